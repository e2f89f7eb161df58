"""One trace under one policy: requests, replicas and slots of the real pool in simulated time.

A request is given to a replica with a free place as the dispatcher does it: first come, first
served, to the replica with the fewest requests. Reserved is a replica from the claim of its slot
until the slot is given back. Single-threaded; one object is one run.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nagara.contract.replica import Lease
from nagara.control.autoscaler import Decision, ReplicaView
from nagara.control.demand import DemandWindow
from nagara.control.replay.policy import MAX_REPLICAS, Policy, Seen
from nagara.control.scaling import TICK_S
from nagara.pool.actions import Granted
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.simulate.throughput import big_pool

LINGER_S = 3600.0
_ANY = DemandClass()
_APP = Claimant("app")
Request = tuple[float, float]  # (arrival, duration) in seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. Seconds."""

    waits_s: tuple[float, ...]  # of each answered request, in order of arrival
    unserved: int
    starts: int
    device_s: float  # reserved
    busy_s: float  # of these, with at least one request running
    starting_s: float  # of these, before ready


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    lease: Lease
    claimed_s: float
    ready_s: float | None = None
    running: int = 0
    changed_s: float = 0.0  # when it last became busy or idle
    is_open: bool = True  # False: it drains


@dataclass(slots=True)
class _Sums:
    device_s: float = 0.0
    busy_s: float = 0.0
    starting_s: float = 0.0
    starts: int = 0
    waits_s: list[tuple[float, float]] = field(default_factory=list)  # (arrival, wait)


class World:
    """One run.

    Args:
        slots: requests a replica takes at a time.
        machines: how many replicas the pool has slots for.
        linger_s: a run ends so long after its last answer, whatever is still there or waits.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        cold_start_s: float,
        machines: int = MAX_REPLICAS,
        linger_s: float = LINGER_S,
    ) -> None:
        self._policy = policy
        self._slots = slots
        self._cold_start_s = cold_start_s
        self._linger_s = linger_s
        self._pool = big_pool(machines, devices=1)
        self._names = itertools.count()
        self._replicas: dict[str, _Replica] = {}
        self._events: list[tuple[float, int, str, float]] = []  # (when, order, replica, begun)
        self._order = itertools.count()
        self._held: deque[Request] = deque()
        self._sums = _Sums()
        self._window = DemandWindow(0.0)
        self._now_s = 0.0

    def run(self, requests: Sequence[Request]) -> Outcome:
        """The whole trace, and after it until every replica is gone."""
        for _ in range(self._policy.begin()):
            replica = self._start()
            if replica is not None:
                self._ready(replica)
        coming = iter(requests)
        request = next(coming, None)
        next_tick_s = TICK_S
        last_s = requests[-1][0] if requests else 0.0
        while request is not None or self._held or self._replicas:
            event_s = self._events[0][0] if self._events else float("inf")
            arrival_s = request[0] if request is not None else float("inf")
            self._now_s = min(event_s, arrival_s, next_tick_s)
            if request is None and not self._events and self._now_s > last_s + self._linger_s:
                break
            if event_s == self._now_s:
                self._event()
                last_s = max(last_s, self._now_s)
            elif request is not None and arrival_s == self._now_s:
                self._arrive(request)
                request = next(coming, None)
            else:
                next_tick_s += TICK_S
                self._carry_out(self._policy.tick(self._seen()))
        for replica in list(self._replicas.values()):
            self._stop(replica)
        return self._outcome()

    def _outcome(self) -> Outcome:
        sums = self._sums
        return Outcome(
            tuple(wait_s for _, wait_s in sorted(sums.waits_s)), len(self._held), sums.starts,
            sums.device_s, sums.busy_s, sums.starting_s,
        )  # fmt: skip

    def _seen(self) -> Seen:
        return Seen(self._now_s, self._window, len(self._held), tuple(self._views()))

    def _views(self) -> Iterator[ReplicaView]:
        for replica in self._replicas.values():
            if replica.is_open:
                idle_s = 0.0 if replica.running else self._now_s - replica.changed_s
                is_ready = replica.ready_s is not None
                yield ReplicaView(
                    replica.name, is_ready, replica.running, idle_s if is_ready else 0.0
                )

    # -- requests --------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._window.enter(self._now_s)
        self._held.append(request)
        self._hand_out()
        if self._held:
            self._carry_out(Decision(0, start=self._policy.held(self._seen())))

    def _hand_out(self) -> None:
        while self._held:
            free = [
                replica
                for replica in self._replicas.values()
                if replica.is_open and replica.ready_s is not None and replica.running < self._slots
            ]
            if not free:
                return
            replica = min(free, key=lambda one: one.running)
            arrived_s, takes_s = self._held.popleft()
            self._sums.waits_s.append((arrived_s, self._now_s - arrived_s))
            if replica.running == 0:
                replica.changed_s = self._now_s
            replica.running += 1
            self._push(self._now_s + takes_s, replica.name, self._now_s)

    def _event(self) -> None:
        """A replica has become ready, or one of its requests has ended."""
        _, _, name, begun_s = heapq.heappop(self._events)
        replica = self._replicas.get(name)
        if replica is None:  # its start was cancelled
            return
        if begun_s < 0:
            self._ready(replica)
            return
        self._window.leave(self._now_s)
        replica.running -= 1
        if replica.running == 0:
            self._sums.busy_s += self._now_s - replica.changed_s
            replica.changed_s = self._now_s
            if not replica.is_open:
                self._stop(replica)
        self._hand_out()

    def _push(self, at_s: float, name: str, begun_s: float) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), name, begun_s))

    # -- replicas --------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        for _ in range(decision.start):
            replica = self._start()
            if replica is None:
                return
            self._push(self._now_s + self._cold_start_s, replica.name, -1.0)
        for name in (*decision.cancel, *decision.drain):
            replica = self._replicas[name]
            replica.is_open = False
            if replica.running == 0:
                self._stop(replica)

    def _start(self) -> _Replica | None:
        granted = self._pool.claim(_APP, _ANY, self._now_s)
        if not isinstance(granted, Granted):
            return None
        replica = _Replica(f"r{next(self._names)}", granted.lease, self._now_s)
        self._replicas[replica.name] = replica
        self._sums.starts += 1
        return replica

    def _ready(self, replica: _Replica) -> None:
        replica.ready_s = replica.changed_s = self._now_s
        self._sums.starting_s += self._now_s - replica.claimed_s
        self._hand_out()

    def _stop(self, replica: _Replica) -> None:
        del self._replicas[replica.name]
        self._pool.give_back(replica.lease, self._now_s, is_confirmed=True)
        self._pool.take_writes()
        self._sums.device_s += self._now_s - replica.claimed_s
        if replica.ready_s is None:
            self._sums.starting_s += self._now_s - replica.claimed_s
        elif replica.running:
            self._sums.busy_s += self._now_s - replica.changed_s
