"""Watches the watchers: a monitor that makes no progress says nothing, whatever it said before.

Monitors report a count that rises with each finished round, not merely that they live: a stuck
loop whose heart still beats is found out. Readings are of a clock that never jumps. Pure.
"""

from dataclasses import dataclass, field

ROUNDS = 3.0  # rounds that may be missed


@dataclass(slots=True)
class _Seen:
    every_s: float
    count: int
    at_s: float  # when the count last rose


@dataclass(slots=True)
class Watchdog:
    """All monitors by name."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def expect(self, monitor: str, every_s: float, now_s: float) -> None:
        """A monitor begins; its rounds take `every_s`."""
        self._seen[monitor] = _Seen(every_s, -1, now_s)

    def progress(self, monitor: str, count: int, now_s: float) -> None:
        """The monitor has finished that many rounds."""
        seen = self._seen.get(monitor)
        if seen is not None and count > seen.count:
            seen.count, seen.at_s = count, now_s

    def has_spoken(self, monitor: str) -> bool:
        """Whether it has told of a round since it is expected to."""
        seen = self._seen.get(monitor)
        return seen is not None and seen.count >= 0

    def forget(self, monitor: str) -> None:
        """The monitor has ended on purpose."""
        self._seen.pop(monitor, None)

    def slept(self, seconds: float) -> None:
        """Nothing could run for so long: nobody is to blame for it."""
        for seen in self._seen.values():
            seen.at_s += seconds

    def stuck(self, now_s: float) -> list[str]:
        """Monitors without progress for too long: what they watch is unknown."""
        return sorted(
            name for name, seen in self._seen.items() if now_s - seen.at_s > ROUNDS * seen.every_s
        )
