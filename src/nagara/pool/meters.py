"""What is measured of demand: arrivals of claims and ends of leases, by class. Pure."""

import math
from collections.abc import Iterable
from typing import Any

from nagara.pool.buffer import MEAN_AGE_S, MEAN_HALF_LIFE_S, WINDOW_S, ArrivalMeter
from nagara.pool.demandclass import DemandClass
from nagara.pool.ledger import wanted_document, wanted_from
from nagara.pool.season import Season


class Meters:
    """Arrivals of claims and ends of leases, by class.

    Args:
        day_s: what has to be added to the clock to have the time of day.
    """

    def __init__(self, day_s: float = 0.0) -> None:
        self._day_s = day_s
        self._seasons: dict[DemandClass, Season] = {}
        self._meters: dict[DemandClass, ArrivalMeter] = {}
        self._returns: dict[DemandClass, ArrivalMeter] = {}
        self._held: dict[DemandClass, float] = {}  # mean, following like the returns' own
        self._held_at_s: dict[DemandClass, float] = {}  # when it was last taken

    def expect(self, wanted: DemandClass, now_s: float) -> bool:
        """Claims of the class will come; False if it is known already."""
        if wanted in self._meters:
            return False
        self._meters[wanted] = ArrivalMeter(now_s)
        return True

    def claimed(self, wanted: DemandClass, now_s: float) -> None:
        """One claim of the class arrived, served or not."""
        meter = self._meters.get(wanted)
        if meter is None:
            meter = self._meters[wanted] = ArrivalMeter(now_s)
        meter.add(wanted.devices, now_s)
        season = self._seasons.get(wanted)
        if season is None:
            season = self._seasons[wanted] = Season(self._day_s)
        season.add(wanted.devices, now_s)

    def expected(
        self, wanted: DemandClass, meter: ArrivalMeter, within_s: float, now_s: float
    ) -> float:
        """Devices that will be claimed within the time, by the present rate and the day's course.

        The rate is a mean of the last hour or so, and demand may have moved on since.
        """
        expected = meter.rate() * within_s / WINDOW_S
        season = self._seasons.get(wanted)
        if season is None:
            return expected
        foretold = season.expected(within_s, now_s)
        if foretold is None:
            return expected
        # The mean of the last hour, moved on by the day's course: right when today is unlike
        # other days. Where both agree as far as chance allows, the one that knows more is taken.
        moved = expected * season.ratio(now_s - MEAN_AGE_S, now_s + within_s / 2)
        counted = max(meter.rate() * MEAN_AGE_S / WINDOW_S, 1e-9)
        chance = math.sqrt(meter.dispersion / counted)
        return foretold if abs(moved - foretold) <= 2 * chance * foretold else moved

    def returned(self, wanted: DemandClass, now_s: float) -> None:
        """A lease of the class ended."""
        meter = self._returns.get(wanted)
        if meter is None:
            meter = self._returns[wanted] = ArrivalMeter(now_s)
        meter.add(wanted.devices, now_s)

    def share_returned(self, wanted: DemandClass, held: float, now_s: float) -> float:
        """Share of the held devices that is given back per minute, as it has been of late.

        The mean of what is held is taken here, once a minute at most.
        """
        meter = self._returns.get(wanted)
        if meter is None:
            return 0.0
        meter.advance(now_s)
        mean = self._held.get(wanted, held)
        if now_s >= self._held_at_s.get(wanted, now_s - WINDOW_S) + WINDOW_S - 1.0:
            kept = 0.5 ** (WINDOW_S / MEAN_HALF_LIFE_S)
            mean = mean * kept + held * (1 - kept)
            self._held[wanted], self._held_at_s[wanted] = mean, now_s
        return min(1.0, meter.rate() / mean) if mean > 0 else 0.0

    def to_document(self, now_s: float) -> list[dict[str, Any]]:
        """As JSON, in ages instead of readings of a clock."""
        return [
            {
                "wanted": wanted_document(wanted),
                "claims": meter.to_document(now_s),
                "returns": None
                if (returns := self._returns.get(wanted)) is None
                else returns.to_document(now_s),
                "held": self._held.get(wanted),
                "season": None
                if (season := self._seasons.get(wanted)) is None
                else season.to_document(),
            }
            for wanted, meter in self._meters.items()
        ]

    def load(self, documents: list[dict[str, Any]], now_s: float) -> None:
        """Takes over what an earlier process has counted."""
        for document in documents:
            wanted = wanted_from(document["wanted"])
            self._meters[wanted] = ArrivalMeter.from_document(document["claims"], now_s)
            if document["returns"] is not None:
                self._returns[wanted] = ArrivalMeter.from_document(document["returns"], now_s)
            if document["held"] is not None:
                self._held[wanted] = document["held"]
            if document.get("season") is not None:
                season = self._seasons[wanted] = Season(self._day_s)
                season.load(document["season"])

    def all(self, now_s: float) -> Iterable[tuple[DemandClass, ArrivalMeter]]:
        """Every class ever claimed, up to date."""
        for wanted, meter in self._meters.items():
            meter.advance(now_s)
            yield wanted, meter
