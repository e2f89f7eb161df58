"""Which idle machines are looked at thoroughly now: few at once, never below target. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

EVERY_S = 7 * 86_400.0
SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Candidate:
    """An idle, ready machine and when it last passed heavy diagnostics (None: never)."""

    name: str
    free_slots: int
    checked_s: float | None


def at_once(pool_size: int) -> int:
    """How many machines may be diagnosed at the same time."""
    return max(1, int(SHARE * pool_size))


def due(
    idle: Iterable[Candidate],
    pool_size: int,
    under_way: int,
    level: int,
    target: float,
    now_s: float,
) -> list[str]:
    """Machines to take out for heavy diagnostics, longest unchecked first.

    Args:
        pool_size: all machines of the pool.
        under_way: those that are being diagnosed already.
        level: free slots now; `target`: free slots wanted.
    """
    allowed = at_once(pool_size) - under_way
    chosen: list[str] = []
    late = [one for one in idle if one.checked_s is None or now_s - one.checked_s >= EVERY_S]
    for one in sorted(late, key=lambda one: (one.checked_s is not None, one.checked_s or 0.0)):
        if len(chosen) >= allowed:
            break
        if level - one.free_slots < target:
            continue
        level -= one.free_slots
        chosen.append(one.name)
    return chosen
