"""What decides in a replay, and nagara's own way: the decision function that `nagara up` runs.

A policy is asked at the trace's begin, whenever a request had to be held, and once a second.
"""

from dataclasses import dataclass, field
from typing import Protocol

from nagara.control.autoscaler import (
    Decision,
    Memory,
    ReplicaView,
    Rules,
    decide,
    missing_now,
)
from nagara.control.demand import DemandWindow
from nagara.control.keepalive import auto_idle_s, hold_s, pre_warm

MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy may look at: what control knows at that moment."""

    now_s: float
    window: DemandWindow
    held: int  # requests that wait for a replica
    replicas: tuple[ReplicaView, ...]  # ready or starting

    @property
    def present(self) -> int:
        """Ready plus starting replicas."""
        return len(self.replicas)

    @property
    def ready(self) -> int:
        """Ready replicas."""
        return sum(replica.is_ready for replica in self.replicas)


class Policy(Protocol):
    """One way to decide how many replicas there are."""

    def begin(self) -> int:
        """Replicas that are there before the first request."""
        ...

    def held(self, seen: Seen) -> int:
        """A request found no free place: replicas to start at this moment."""
        ...

    def tick(self, seen: Seen) -> Decision:
        """The decision of this second."""
        ...


@dataclass(slots=True)
class Nagara:
    """The scaling of `nagara up`, for an app with nothing set but its concurrency."""

    concurrency: int
    cold_start_s: float
    memory: Memory = field(default_factory=Memory)

    def begin(self) -> int:
        return 0

    def held(self, seen: Seen) -> int:
        return missing_now(self._rules(seen), seen.window.now, seen.present)

    def tick(self, seen: Seen) -> Decision:
        demand = seen.window.measured(seen.held, seen.now_s)
        rules = self._rules(seen)
        decision, self.memory = decide(seen.now_s, rules, self.memory, demand, seen.replicas)
        return decision

    def _rules(self, seen: Seen) -> Rules:
        pauses_s = seen.window.pauses_s
        idle_s = auto_idle_s(self.cold_start_s, pauses_s)
        warm = pre_warm(self.cold_start_s, pauses_s, idle_s)
        return Rules(
            0, MAX_REPLICAS, self.concurrency, idle_s, hold_s=hold_s(self.cold_start_s), warm=warm
        )
