"""nagara's scaling beside the rivals, on one trace. Pure.

Each rival runs with its usual setting and over a grid of its own; of the grid, the point is shown
that comes nearest to beating nagara in both wait and device-seconds. `hindsight` is no rival but a
bound: the constant number that somebody would have chosen who knew the whole trace before.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nagara.control.replay.policy import Nagara, Policy
from nagara.control.replay.rivals import KEEP_ALIVE_S, TARGET, KeepAlive, Knative, Peak, QueueRatio
from nagara.control.replay.world import LINGER_S, Outcome, Request, World

Make = Callable[[], Policy]
Settings = dict[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared. Waits in seconds; utilisation is busy seconds of reserved ones."""

    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    device_seconds: float
    starts: int
    unserved: int
    allocation_utilisation: float
    idle: dict[str, float]  # seconds reserved and not busy, by cause

    def is_better(self, other: "Figures") -> bool:
        """Whether it beats the other in the 95th percentile of waits and in device-seconds."""
        return (
            self.unserved <= other.unserved
            and self.wait_p95_s < other.wait_p95_s
            and self.device_seconds < other.device_seconds
        )


def figures(outcome: Outcome) -> Figures:
    """The figures of one run."""
    waits_s = sorted(outcome.waits_s)
    idle_s = outcome.device_s - outcome.busy_s - outcome.starting_s
    return Figures(
        wait_p50_s=round(_quantile(waits_s, 0.50), 3),
        wait_p95_s=round(_quantile(waits_s, 0.95), 3),
        wait_p99_s=round(_quantile(waits_s, 0.99), 3),
        device_seconds=round(outcome.device_s, 1),
        starts=outcome.starts,
        unserved=outcome.unserved,
        allocation_utilisation=round(outcome.busy_s / max(outcome.device_s, 1e-9), 4),
        idle={"starting": round(outcome.starting_s, 1), "keep_alive": round(idle_s, 1)},
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Replay:
    """One trace with the same slots and starts for everybody."""

    requests: Sequence[Request]
    slots: int
    cold_start_s: float

    def nagara(self) -> Figures:
        """By the decision function of `nagara up`."""
        return self._figures(Nagara(self.slots, self.cold_start_s))

    def rival(self, name: str, settings: Settings) -> Figures:
        """One rival with these settings."""
        linger_s = 0.0 if name == "peak" else LINGER_S
        return self._figures(self._policy(name, settings), linger_s)

    def usual(self, name: str) -> Settings:
        """The setting a rival comes with."""
        target = TARGET * self.slots
        return {
            "knative": {"target": target, "window_s": 60.0, "panic_threshold": 2.0},
            "queue_ratio": {"target": target, "down_window_s": 60.0, "tolerance": 0.1},
            "keepalive": {"keep_s": 60.0},
            "peak": {"count": float(self.most_at_once())},
        }[name]

    def grid(self, name: str) -> Iterator[Settings]:
        """The settings a rival is tried with."""
        targets = [share * self.slots for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
        every: dict[str, dict[str, Iterable[float]]] = {
            "knative": {
                "target": targets,
                "window_s": (10.0, 20.0, 30.0, 60.0),
                "panic_threshold": (1.5, 2.0, 3.0),
            },
            "queue_ratio": {
                "target": targets,
                "down_window_s": (0.0, 15.0, 30.0, 60.0, 300.0),
                "tolerance": (0.0, 0.1),
            },
            "keepalive": {"keep_s": (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0)},
            "peak": {"count": [float(math.ceil(self.most_at_once() * room)) for room in ROOMS]},
        }
        axes = every[name]
        for values in itertools.product(*axes.values()):
            yield dict(zip(axes, values, strict=True))

    def most_at_once(self) -> int:
        """Replicas for the most requests that would run at once if none had to wait."""
        changes = sorted(
            itertools.chain(
                ((at_s, 1) for at_s, _ in self.requests),
                ((at_s + takes_s, -1) for at_s, takes_s in self.requests),
            )
        )
        running = itertools.accumulate(change for _, change in changes)
        return -(-max(running, default=1) // self.slots)

    def _policy(self, name: str, settings: Settings) -> Policy:
        if name == "knative":
            return Knative(settings["target"], settings["window_s"], settings["panic_threshold"])
        if name == "queue_ratio":
            window_s = settings["down_window_s"]
            cool_down_s = max(KEEP_ALIVE_S, window_s)
            return QueueRatio(settings["target"], window_s, cool_down_s, settings["tolerance"])
        if name == "keepalive":
            return KeepAlive(self.slots, settings["keep_s"])
        return Peak(int(settings["count"]))

    def _figures(self, policy: Policy, linger_s: float = LINGER_S) -> Figures:
        world = World(policy, slots=self.slots, cold_start_s=self.cold_start_s, linger_s=linger_s)
        return figures(world.run(self.requests))


RIVALS = ("knative", "queue_ratio", "keepalive", "peak")
ROOMS = (1.0, 1.1, 1.25, 1.5, 2.0)  # of an always-on peak: replicas for so many times the most


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival's usual run, and of its grid the one that comes nearest to nagara's."""

    usual: Figures
    settings: Settings
    best: Figures | None = None
    best_settings: Settings | None = None
    tried: int = 0
    better_in_both: int = 0  # points of the grid


def compare(replay: Replay, say: Callable[[str], None], *, grids: bool) -> dict[str, Any]:
    """`{"nagara": Figures, RIVAL: Rival, "hindsight": Rival}`, the last only with `grids`."""
    own = replay.nagara()
    found: dict[str, Any] = {"nagara": own}
    for name in RIVALS:
        say(f"{name}{' and its grid' if grids else ''}")
        settings = replay.usual(name)
        usual = replay.rival(name, settings)
        if not grids:
            found[name] = Rival(usual, settings)
            continue
        points = [(replay.rival(name, point), point) for point in replay.grid(name)]
        best, best_settings = min(points, key=lambda one: distance(one[0], own))
        better = sum(point.is_better(own) for point, _ in points)
        found[name] = Rival(usual, settings, best, best_settings, len(points), better)
    if grids:
        say("a constant number in hindsight")
        found["hindsight"] = _hindsight(replay, own)
    return found


def _hindsight(replay: Replay, own: Figures) -> Rival:
    points = [
        (replay.rival("peak", {"count": float(n)}), n) for n in range(1, replay.most_at_once())
    ]
    points = points or [(replay.rival("peak", {"count": 1.0}), 1)]
    best, count = min(points, key=lambda one: distance(one[0], own))
    better = sum(point.is_better(own) for point, _ in points)
    settings = {"count": float(count)}
    return Rival(best, settings, best, settings, len(points), better)


def distance(rival: Figures, own: Figures) -> float:
    """Below 1: better than `own` in both; the smaller, the nearer to that."""
    if rival.unserved > own.unserved:
        return float("inf")
    # A wait of nothing has no ratio: a hundredth of a second is nothing.
    waits = (rival.wait_p95_s + 0.01) / (own.wait_p95_s + 0.01)
    return max(waits, rival.device_seconds / max(own.device_seconds, 1e-9))
