"""What goes on now, for those who watch: once a second, as server-sent events.

A listener gets everything at first (`hello`), then only what changed: `apps` (rows that are new
or other, names that are gone), `starts` (recorded since), `pool` (when it changed), `sample`
(rates of the last second). All listeners get the same bytes. One that cannot keep up is let go;
it comes back and begins with a `hello`. Nothing is read from the database without listeners.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.control.history import History
from nagara.control.replicas import ReplicaState
from nagara.control.service import Service
from nagara.control.telemetry import Telemetry
from nagara.pool.service import PoolService

EVERY_S = 1.0
KEPT_SAMPLES = 300
_QUEUE = 32
_REASON_CHARS = 2000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """All apps together over one second, and the pool at its end. Rates are per second."""

    at_s: float  # wall
    requests: float
    failures: float
    tokens: float
    held: int
    running: int
    ready: int
    starting: int
    level: int
    target: float
    leased: int


@dataclass(slots=True)
class _Counted:
    """One app's answered requests, failed ones among them, and tokens."""

    answered: float = 0.0
    failed: float = 0.0  # with 429 or 5xx
    tokens: float = 0.0

    def since(self, before: "_Counted") -> "_Counted":
        return _Counted(
            self.answered - before.answered,
            self.failed - before.failed,
            self.tokens - before.tokens,
        )


def _rates(news: _Counted, elapsed_s: float) -> dict[str, float]:
    return {
        "requests_s": round(news.answered / elapsed_s, 2),
        "tokens_s": round(news.tokens / elapsed_s, 1),
    }


class Live:
    """The watcher of one control process.

    Args:
        services: the deployed apps by name, read each second.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        telemetry: Telemetry,
        pool: PoolService,
        history: History,
        clock: Clock,
    ) -> None:
        self._services = services
        self._metrics = telemetry.metrics
        self._pool = pool
        self.history = history
        self._clock = clock
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._counted: dict[str, _Counted] = {}  # by app, at the last look
        self._looked_s = clock.monotonic_s()
        self._since_s: dict[str, float] = {}  # wall time at which a starting replica was seen
        self._checks_since_s: dict[tuple[str, int], float] = {}  # by machine and epoch, wall
        self._rows: dict[str, dict[str, Any]] = {}
        self._pool_row: dict[str, Any] = {}
        self._last_start = 0
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await self._clock.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """One round: a sample, and the news for those who listen."""
        now_s = self._clock.monotonic_s()
        elapsed_s = max(now_s - self._looked_s, 1e-3)
        self._looked_s = now_s
        counted = self._count()
        news = {
            name: now.since(self._counted.get(name, _Counted())) for name, now in counted.items()
        }
        self._counted = counted
        rows = {
            name: self._row(one, _rates(news.get(name, _Counted()), elapsed_s))
            for name, one in list(self._services.items())
        }
        starting = {each["replica"] for row in rows.values() for each in row["starts"]}
        self._since_s = {name: at_s for name, at_s in self._since_s.items() if name in starting}
        sample = self._sample(rows, list(news.values()), elapsed_s)
        self.samples.append(sample)
        changed = [row for name, row in rows.items() if self._rows.get(name) != row]
        gone = [name for name in self._rows if name not in rows]
        self._rows = rows
        if not self._listeners:
            return
        if changed or gone:
            self._tell("apps", {"changed": changed, "gone": gone})
        await self._tell_starts()
        pool_row = self._describe_pool()
        if pool_row != self._pool_row:
            self._pool_row = pool_row
            self._tell("pool", pool_row)
        self._tell("sample", asdict(sample))

    async def listen(self) -> AsyncIterator[bytes]:
        """The events from now on, each as it goes over the wire; ends when nagara does."""
        if self._is_closed:
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        starts = await self.history.starts()
        if not self._listeners:
            self._last_start = starts[0]["id"] if starts else 0
        self._pool_row = self._describe_pool()
        rows = {name: self._row(one, None) for name, one in list(self._services.items())}
        hello = {
            "apps": list(rows.values()),
            "starts": starts,
            "pool": self._pool_row,
            "samples": [asdict(sample) for sample in self.samples],
        }
        self._listeners.add(queue)
        try:
            yield _event("hello", hello)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """Lets all listeners go."""
        self._is_closed = True
        for queue in list(self._listeners):
            self._drop(queue)

    async def _tell_starts(self) -> None:
        try:
            starts = await self.history.starts_after(self._last_start)
        except NagaraError as error:  # they are told when they can be read again
            _log.warning("new starts cannot be read: %s", error.what)
            return
        if starts:
            self._last_start = starts[-1]["id"]
            self._tell("starts", starts)

    def _tell(self, name: str, document: object) -> None:
        event = _event(name, document)
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._drop(queue)

    def _drop(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Ends a listener at once, whatever still waits for it."""
        self._listeners.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    def _sample(
        self, rows: Mapping[str, Mapping[str, Any]], news: list[_Counted], elapsed_s: float
    ) -> Sample:
        pool = self._pool.figures()
        return Sample(
            at_s=round(self._clock.wall_s(), 3),
            requests=round(sum(one.answered for one in news) / elapsed_s, 2),
            failures=round(sum(one.failed for one in news) / elapsed_s, 2),
            tokens=round(sum(one.tokens for one in news) / elapsed_s, 1),
            held=sum(row["held"] for row in rows.values()),
            running=sum(row["running"] for row in rows.values()),
            ready=sum(row["ready"] for row in rows.values()),
            starting=sum(row["starting"] for row in rows.values()),
            level=pool.level,
            target=pool.target,
            leased=pool.leased,
        )

    def _row(self, service: Service, rates: Mapping[str, float] | None) -> dict[str, Any]:
        """An app as the page lists it. Without `rates` they are those told last."""
        name = service.app.name
        dispatcher, capture = service.dispatcher, service.capture
        counts = dict.fromkeys(ReplicaState, 0)
        for replica in service.replicas.values():
            counts[replica.state] += 1
        reason = None if capture.report is None else capture.report.reason
        return {
            "name": name,
            "version": service.version,
            **{state.value: counts[state] for state in _SHOWN},
            "min": service.app.scale.min,
            "max": service.app.scale.max,
            "running": dispatcher.demand.now - dispatcher.held,
            "held": dispatcher.held,
            **(self._told_rates(name) if rates is None else rates),
            "failures": service.failures.count,
            "last_failure": service.failures.reason[-_REASON_CHARS:] or None,
            "capture": capture.state,
            "capture_reason": None if reason is None else reason[-_REASON_CHARS:],
            "starts": [self._starting(each) for each in _starting(service)],
        }

    def _told_rates(self, name: str) -> dict[str, float]:
        told = self._rows.get(name, {})
        return {key: told.get(key, 0.0) for key in ("requests_s", "tokens_s")}

    def _count(self) -> dict[str, _Counted]:
        """What has been counted since this process began, by app."""
        found: dict[str, _Counted] = {}
        for (app, status), count in self._metrics.requests.values.items():
            one = found.setdefault(app, _Counted())
            one.answered += count
            one.failed += count if status == "429" or status >= "500" else 0.0
        for (app,), count in self._metrics.tokens.values.items():
            found.setdefault(app, _Counted()).tokens = count
        return found

    def _starting(self, replica: str) -> dict[str, Any]:
        since_s = self._since_s.setdefault(replica, round(self._clock.wall_s(), 3))
        return {"replica": replica, "since_s": since_s}

    def _describe_pool(self) -> dict[str, Any]:
        document = self._pool.document()
        seen_s, now_s = self._checks_since_s, round(self._clock.wall_s(), 3)
        checked = [one for one in document["machines"] if one["running_check"]]
        # An epoch stands for one stay in one state.
        keys = [(one["name"], one["epoch"]) for one in checked]
        self._checks_since_s = {key: seen_s.get(key, now_s) for key in keys}
        for machine, key in zip(checked, keys, strict=True):
            machine["check_since_s"] = self._checks_since_s[key]
        return {**document, "plan": self._pool.plan_document()}


_SHOWN = (
    ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STOPPING,
)  # fmt: skip


def _starting(service: Service) -> list[str]:
    return [
        name for name, replica in service.replicas.items() if replica.state is ReplicaState.STARTING
    ]


def _event(name: str, document: object) -> bytes:
    """JSON has no line ends of its own, so one `data` line is enough."""
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
