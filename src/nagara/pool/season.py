"""The course of a day that demand follows, learned from earlier days. Pure.

Claims are counted in half hours of the day; days fade. How busy this day is, against the others
at the same time, is the mean of its last hours: because their course is taken out, it may be
taken over more time than a plain mean, and says more. Before a whole day was seen nothing is
foretold.
"""

from dataclasses import dataclass, field
from typing import Any

DAY_S = 86_400.0
BINS = 48
_BIN_S = DAY_S / BINS
_KEPT = 0.7  # of a day's weight, one day later
_DRAWN = 20.0  # claims of the mean half hour that are believed before any was counted
_LEAST, _MOST = 0.4, 2.5
_LEVEL_KEPT = 0.5 ** (1 / 4)  # of one half hour in the next, for how busy this day is


@dataclass(slots=True)
class Season:
    """Claims by half hour of the day.

    Attributes:
        day_s: what has to be added to the clock of `now_s` to have the time of day.
    """

    day_s: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * BINS)
    _weights: list[float] = field(default_factory=lambda: [0.0] * BINS)
    _bin: int = -1  # counted from the beginning of the clock
    _count: float = 0.0
    _level_claims: float = 0.0
    _level_usual: float = 0.0

    def add(self, count: int, now_s: float) -> None:
        """`count` claims arrived now."""
        self.advance(now_s)
        self._count += count

    def advance(self, now_s: float) -> None:
        """Closes the half hours that are over."""
        number = int((now_s + self.day_s) // _BIN_S)
        if self._bin < 0:
            self._bin = number
            if self._level_usual > 0:  # nobody counted the beginning of this half hour
                level = self._level_claims / self._level_usual
                part = (now_s + self.day_s) / _BIN_S - number
                self._count = level * part * self._usual(number % BINS)
        while self._bin < number:
            if number - self._bin > 2 * BINS:  # nobody asked for days: they say nothing
                self._bin, self._count = number, 0.0
                return
            at = self._bin % BINS
            self._level_claims = self._level_claims * _LEVEL_KEPT + self._count
            self._level_usual = self._level_usual * _LEVEL_KEPT + self._usual(at)
            self._sums[at] = self._sums[at] * _KEPT + self._count
            self._weights[at] = self._weights[at] * _KEPT + 1.0
            self._count = 0.0
            self._bin += 1

    def _usual(self, at: int) -> float:
        return self._sums[at] / self._weights[at] if self._weights[at] else 0.0

    def expected(self, within_s: float, now_s: float) -> float | None:
        """Claims within the time from now, or None before a whole day was seen."""
        self.advance(now_s)
        if min(self._weights) == 0.0 or self._level_usual <= 0:
            return None
        mean = sum(map(self._usual, range(BINS))) / BINS
        part = (now_s + self.day_s) / _BIN_S - self._bin  # of this half hour
        claims = self._level_claims + self._count
        usual = self._level_usual + part * self._usual(self._bin % BINS)
        level = (claims + _DRAWN) / (usual + _DRAWN)
        return level * self._level(now_s + within_s / 2, mean) * within_s / _BIN_S

    def ratio(self, from_s: float, to_s: float) -> float:
        """How much more is asked for at the time of day of `to_s` than at that of `from_s`."""
        if min(self._weights) == 0.0:
            return 1.0
        mean = sum(s / w for s, w in zip(self._sums, self._weights, strict=True)) / BINS
        if mean <= 0:
            return 1.0
        return min(_MOST, max(_LEAST, self._level(to_s, mean) / self._level(from_s, mean)))

    def _level(self, at_s: float, mean: float) -> float:
        """Between the middles of half hours, each smoothed with its neighbours."""
        place = ((at_s + self.day_s) / _BIN_S - 0.5) % BINS
        low = int(place)
        part = place - low
        return (1 - part) * self._smooth(low, mean) + part * self._smooth(low + 1, mean)

    def _smooth(self, number: int, mean: float) -> float:
        total = weight = 0.0
        for offset, share in ((-2, 0.5), (-1, 1.0), (0, 1.0), (1, 1.0), (2, 0.5)):
            at = (number + offset) % BINS
            total += share * self._sums[at]
            weight += share * self._weights[at]
        drawn = _DRAWN / mean if mean < _DRAWN else 1.0  # in half hours
        return (total + drawn * mean) / (weight + drawn)

    def to_document(self) -> dict[str, Any]:
        """As JSON: the half hours that are over."""
        level = [self._level_claims, self._level_usual]
        return {"sums": list(self._sums), "weights": list(self._weights), "level": level}

    def load(self, document: dict[str, Any]) -> None:
        """Takes over an earlier process's."""
        self._sums, self._weights = list(document["sums"]), list(document["weights"])
        self._level_claims, self._level_usual = document["level"]
