"""Other ways to scale, by their published rules, over the same requests and slots.

- `Knative`: the concurrency autoscaler of Knative Serving: mean concurrency over a stable window
  and over a tenth of it, a panic mode entered at twice the ready pods and left when the stable
  window has passed without it, at most half of the pods taken away at a time.
- `QueueRatio`: what the Kubernetes horizontal autoscaler makes of a queue's length, as KEDA feeds
  it: ceil(present x value / target), nothing within a tolerance of 10 %, never below the highest
  recommendation of a stabilisation window, from and to zero by activation and cool-down.
- `KeepAlive`: an instance for each request that finds none, kept a fixed time, as function
  services do it.
- `Peak`: a fixed number, always on.

Each decides once a second, and is spared what would only make it worse: drained replicas end
their requests, idle ones are drained first, the grace period before zero is left out.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nagara.control.autoscaler import Decision, ReplicaView
from nagara.control.replay.policy import MAX_REPLICAS, Seen

KEEP_ALIVE_S = 60.0
TARGET = 0.7


@dataclass(slots=True)
class Knative:
    """`target`: requests a pod shall have. Seconds."""

    target: float
    window_s: float = KEEP_ALIVE_S
    panic_threshold: float = 2.0
    panic_share: float = 0.1
    max_up_rate: float = 1000.0
    max_down_rate: float = 2.0
    panic_since_s: float | None = None
    most_in_panic: int = 0

    def wanted(self, now_s: float, stable: float, panic: float, ready: int) -> int:
        """Pods wanted, by the mean concurrencies of both windows and the pods that are ready."""
        base = max(1.0, float(ready))
        most = math.ceil(self.max_up_rate * base)
        least = math.floor(base / self.max_down_rate) if ready else 0
        by_stable = math.ceil(stable / self.target)
        by_panic = math.ceil(panic / self.target)
        wanted = min(max(by_stable, least), most)
        if by_panic / base >= self.panic_threshold:
            self.panic_since_s = now_s
        elif self.panic_since_s is not None and now_s > self.panic_since_s + self.window_s:
            self.panic_since_s = None
            self.most_in_panic = 0
        if self.panic_since_s is None:
            return wanted
        wanted = max(wanted, min(max(by_panic, least), most))
        self.most_in_panic = max(self.most_in_panic, wanted)
        return self.most_in_panic

    def begin(self) -> int:
        return 0

    def held(self, seen: Seen) -> int:
        return int(seen.present == 0)  # its activator asks for the first pod at once

    def tick(self, seen: Seen) -> Decision:
        stable = seen.window.mean(self.window_s, seen.now_s)
        panic = seen.window.mean(self.panic_share * self.window_s, seen.now_s)
        wanted = self.wanted(seen.now_s, stable, panic, seen.ready)
        if wanted == 0 and seen.window.idle_s(seen.now_s) < self.window_s:
            wanted = min(1, seen.present)
        return towards(min(wanted, MAX_REPLICAS), seen.replicas)


@dataclass(slots=True)
class QueueRatio:
    """`target`: requests in the system for each replica. Seconds."""

    target: float
    down_window_s: float = KEEP_ALIVE_S
    cool_down_s: float = KEEP_ALIVE_S
    tolerance: float = 0.1
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def recommend(self, present: int, value: float) -> int:
        """Replicas for `value` requests in the system when there are `present`."""
        if present == 0:
            return int(value > 0)
        ratio = value / (present * self.target)
        if abs(ratio - 1.0) <= self.tolerance + 1e-9:
            return present
        return max(1, math.ceil(round(present * ratio, 9)))

    def stabilised(self, now_s: float, recommended: int) -> int:
        """The highest recommendation of the window."""
        while self._wanted and self._wanted[0][0] <= now_s - self.down_window_s:
            self._wanted.popleft()
        self._wanted.append((now_s, recommended))
        return max(count for _, count in self._wanted)

    def begin(self) -> int:
        return 0

    def held(self, seen: Seen) -> int:
        return int(seen.present == 0)

    def tick(self, seen: Seen) -> Decision:
        if seen.window.now == 0 and seen.window.idle_s(seen.now_s) >= self.cool_down_s:
            self._wanted.clear()
            return towards(0, seen.replicas)
        wanted = self.stabilised(seen.now_s, self.recommend(seen.present, seen.window.now))
        return towards(min(wanted, MAX_REPLICAS), seen.replicas)


@dataclass(slots=True)
class KeepAlive:
    """`slots`: requests an instance takes at a time."""

    slots: int
    keep_s: float = KEEP_ALIVE_S

    def begin(self) -> int:
        return 0

    def held(self, seen: Seen) -> int:
        starting = seen.present - seen.ready
        return max(0, math.ceil(seen.held / self.slots) - starting)

    def tick(self, seen: Seen) -> Decision:
        over = tuple(
            one.replica
            for one in seen.replicas
            if one.is_ready and one.running == 0 and one.idle_s >= self.keep_s
        )
        return Decision(seen.present - len(over), drain=over)


@dataclass(slots=True)
class Peak:
    """`count` replicas from the beginning; they end with the last request."""

    count: int

    def begin(self) -> int:
        return self.count

    def held(self, seen: Seen) -> int:
        return 0

    def tick(self, seen: Seen) -> Decision:
        return Decision(self.count)


def towards(wanted: int, replicas: Sequence[ReplicaView]) -> Decision:
    """Starts what is missing; gives up starting ones first, then idle ones, then the others."""
    missing = wanted - len(replicas)
    if missing >= 0:
        return Decision(wanted, start=missing)
    order = sorted(replicas, key=lambda one: (one.is_ready, one.running, -one.idle_s))
    chosen = order[:-missing]
    return Decision(
        wanted,
        cancel=tuple(one.replica for one in chosen if not one.is_ready),
        drain=tuple(one.replica for one in chosen if one.is_ready),
    )
