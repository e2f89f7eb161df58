"""One deployed app while control runs: its definition, queue, replicas and recent history.

Changed by the fleet's tasks on the loop; decides only what follows from its own fields.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from nagara.contract.replica import CaptureReport, ReplicaStatus, StartKind
from nagara.control.app import App
from nagara.control.autoscaler import Demand, Memory, ReplicaView, Rules, missing_now
from nagara.control.dispatch import Dispatcher
from nagara.control.keepalive import Warm, auto_idle_s, hold_s, pre_warm
from nagara.control.occupancy import Use
from nagara.control.recent_starts import RecentStarts
from nagara.control.refusal import Refusal
from nagara.control.replicas import Replica, ReplicaState
from nagara.control.strain import Strain

BACKOFF_MAX_S = 60.0
QUEUE_MIN_S = 30.0
QUEUE_STARTS = 3.0
SHORT_PAUSE_S = 1.0


# What the keep-alive follows from: what the app says, the last start, the latest pauses.
_Known = tuple[float | None, float | None, tuple[float, ...]]


def backoff_s(failures: int) -> float:
    """The pause after so many failures in a row: none after the first, then 1, 2, 4 ... 60 s.

    The first failure may be the moment's; the second in a row is the app's.
    """
    if failures <= 1:
        return 0.0
    return min(BACKOFF_MAX_S, 2.0 ** min(failures - 2, 10))


@dataclass(slots=True)
class Failures:
    """Starts of an app that failed, and replicas that ended at once, in a row."""

    count: int = 0
    reason: str = ""
    retry_at_s: float = 0.0

    def note(self, reason: str, now_s: float) -> None:
        """One more."""
        self.count += 1
        self.reason = reason
        self.retry_at_s = now_s + backoff_s(self.count)

    def left_s(self, now_s: float) -> float:
        """Seconds until another start may be tried."""
        return max(0.0, self.retry_at_s - now_s) if self.count else 0.0


@dataclass(slots=True)
class CaptureStatus:
    """How far the app's snapshot on this machine is.

    `state`: `unknown` (no start yet), `wanted`, `running`, `failed` (once; to be tried again),
    `done`, `off` (not wanted, or failed too often).
    """

    state: str = "unknown"
    report: CaptureReport | None = None
    failures: int = 0


@dataclass(slots=True, eq=False)
class Service:
    """A deployed app at work."""

    app: App
    version: int
    dispatcher: Dispatcher
    replicas: dict[str, Replica] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    failures: Failures = field(default_factory=Failures)
    capture: CaptureStatus = field(default_factory=CaptureStatus)
    recent_starts: RecentStarts = field(default_factory=RecentStarts)
    earlier: dict[str, App] = field(default_factory=dict)  # versions by definition
    warm: int = 0  # replicas that the app's schedule keeps at present
    strain: Strain = field(default_factory=Strain)  # of all apps' replicas
    roll_target: int = 0  # ready replicas when the present version was deployed
    short_until_s: float = 0.0  # there was no slot for it: until then only the tick tries
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set when a replica has gone
    _learned: tuple[_Known, tuple[float, Warm | None]] | None = None  # from what, and what

    def count(self, *states: ReplicaState) -> int:
        """Replicas in one of these states."""
        return sum(replica.state in states for replica in self.replicas.values())

    def by_state(self) -> dict[ReplicaState, int]:
        """How many replicas there are in each state that a replica is in."""
        return dict(Counter(replica.state for replica in self.replicas.values()))

    def idle_use(self) -> Use:
        """Why a replica that has become idle just now is kept."""
        idle = sum(not endpoint.running for endpoint in self.dispatcher.endpoints.values())
        is_buffer = idle <= max(self.app.scale.min, self.warm) + self.app.scale.buffer
        return Use.BUFFER if is_buffer else Use.KEEP_ALIVE

    @property
    def is_coming(self) -> bool:
        """Whether a replica is ready or will be."""
        return self.count(ReplicaState.STARTING, ReplicaState.READY) > 0

    def keep_alive(self) -> tuple[float, Warm | None]:
        """How long the last replica stays, and when one is brought back unasked."""
        start_s = self.recent_starts.last_s
        known = (self.app.scale.idle_s, start_s, self.dispatcher.demand.pauses_s)
        if self._learned is None or self._learned[0] != known:
            said_s, _, pauses_s = known
            idle_s = auto_idle_s(start_s, pauses_s) if said_s is None else said_s
            self._learned = known, (idle_s, pre_warm(start_s, pauses_s, idle_s))
        return self._learned[1]

    @property
    def is_asleep(self) -> bool:
        """At zero, and nothing but a request can change that: there is nothing to decide."""
        return (
            not self.replicas
            and not self.dispatcher.demand.now
            and not self.app.scale.min
            and not self.warm
            and self.keep_alive()[1] is None
        )

    def starts_at_once(self, now_s: float) -> int:
        """Replicas to start, beside those that come, because a request is about to be held."""
        if self.failures.count or now_s < self.short_until_s:
            return 0
        coming = self.count(ReplicaState.STARTING, ReplicaState.READY)
        return missing_now(self.rules(), self.dispatcher.demand.now, coming)

    def queue_s(self) -> float:
        """How long a request may be held.

        By default three times what 95 % of the recent starts of the kind now under way took, 30 s
        at least; where none of that kind was seen, 30 s more than a start may take, so that a
        start's own failure is what it hears of.
        """
        if self.app.timeouts.queue_s is not None:
            return self.app.timeouts.queue_s
        slow_s = self.recent_starts.slow_s(self.start_kind)
        if slow_s is None:
            return self.app.timeouts.start_s + QUEUE_MIN_S
        return max(QUEUE_MIN_S, QUEUE_STARTS * slow_s)

    @property
    def start_kind(self) -> StartKind:
        """How its replicas are started at present, as far as control knows."""
        is_saved = self.app.snapshot and self.capture.state == "done"
        return StartKind.RESTORED if is_saved else StartKind.PLAIN

    def version_of(self, status: ReplicaStatus) -> App | None:
        """The app as it was when this running replica was started; None if it is not of it."""
        if not status.ready or status.exit_code is not None or status.tenant != self.app.tenant:
            return None
        if status.definition == self.app.definition:
            return self.app
        return self.earlier.get(status.definition)

    def is_current(self, replica: Replica) -> bool:
        """Whether the replica is of the present version."""
        return replica.app.definition == self.app.definition

    def has_proven(self, now_s: float) -> bool:
        """Whether a replica of the present version has shown that it can run."""
        endpoints = self.dispatcher.endpoints
        return any(
            replica.name in endpoints and endpoints[replica.name].has_proven(now_s)
            for replica in self.replicas.values()
            if self.is_current(replica)
        )

    def current(self) -> tuple[int, int]:
        """Ready and starting replicas of the present version."""
        mine = [replica for replica in self.replicas.values() if self.is_current(replica)]
        ready = sum(replica.state is ReplicaState.READY for replica in mine)
        return ready, sum(replica.state is ReplicaState.STARTING for replica in mine)

    def outdated(self, now_s: float) -> tuple[ReplicaView, ...]:
        """Ready replicas of versions before the present one."""
        return tuple(
            self._view(replica, now_s)
            for replica in self.replicas.values()
            if replica.state is ReplicaState.READY and not self.is_current(replica)
        )

    def cannot_start(self, retry_after_s: float) -> Refusal:
        """The answer to requests while the app's starts fail."""
        name = self.app.name
        return Refusal(
            503,
            f"the app {name!r} cannot start: {self.failures.reason}; see: nagara logs {name}",
            code="start_failed",
            retry_after_s=retry_after_s,
        )

    def rules(self) -> Rules:
        """What the autoscaler must know of the app."""
        scale = self.app.scale
        idle_s, warm = self.keep_alive()
        last_s = self.recent_starts.last_s
        return Rules(
            *(min(scale.max, max(scale.min, self.warm)), scale.max, scale.concurrency, idle_s),
            buffer=scale.buffer, hold_s=hold_s(last_s), warm=warm,
        )  # fmt: skip

    def demand(self, now_s: float) -> Demand:
        """What the autoscaler must know of the app's requests."""
        return self.dispatcher.demand.measured(self.dispatcher.held, now_s)

    def views(self, now_s: float) -> tuple[ReplicaView, ...]:
        """The replicas that are ready or starting, as the autoscaler sees them.

        Those of earlier versions are not among them: they go as the present one's come.
        """
        return tuple(
            self._view(replica, now_s)
            for replica in self.replicas.values()
            if replica.state in (ReplicaState.STARTING, ReplicaState.READY)
            and self.is_current(replica)
        )

    def _view(self, replica: Replica, now_s: float) -> ReplicaView:
        endpoint = self.dispatcher.endpoints.get(replica.name)
        if endpoint is None:
            return ReplicaView(replica.name, is_ready=False)
        idle_s = 0.0 if endpoint.running else now_s - endpoint.idle_since_s
        is_strained = self.strain.of(replica.name, now_s) is not None
        return ReplicaView(replica.name, True, endpoint.running, idle_s, is_strained)


def longest_idle(services: Iterable[Service], now_s: float) -> tuple[Service, str] | None:
    """The replica that has been idle longest of those that their apps need not keep."""
    idle = [
        (view.idle_s, view.replica, service)
        for service in services
        if service.count(ReplicaState.READY) > max(service.app.scale.min, service.warm)
        and not service.dispatcher.held
        for view in service.views(now_s)
        if view.is_ready and view.running == 0
    ]
    if not idle:
        return None
    _, name, service = max(idle, key=lambda entry: entry[0])
    return service, name
