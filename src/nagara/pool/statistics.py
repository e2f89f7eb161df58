"""What the pool has learned, across restarts: supply, lead times, demand, when it looked at whom.

Kept in ages instead of readings of a clock. While nobody looked, what was seen of supply has
grown older all the same, by the wall clock; one that was set back makes it no younger. Demand that
nobody counted says nothing, so its measurement goes on where it stopped.
"""

from typing import Any

from nagara.base.clock import Clock
from nagara.pool.core import PoolCore
from nagara.pool.health.care import Care
from nagara.pool.meters import Meters


class Statistics:
    """The measurements of one pool, as one JSON document."""

    def __init__(self, core: PoolCore, meters: Meters, care: Care, clock: Clock) -> None:
        self._core = core
        self._meters = meters
        self._care = care
        self._clock = clock
        self._kept_claims = 0

    def changed(self) -> dict[str, Any] | None:
        """The document, if there is something new to keep."""
        supply = self._core.supply.to_document(self._clock.monotonic_s())
        if self._core.claims == self._kept_claims and not supply:
            return None
        self._kept_claims = self._core.claims
        return {
            "wall_s": self._clock.wall_s(),
            "supply": supply,
            "leads": self._core.leads.to_document(),
            "demand": self._meters.to_document(self._clock.monotonic_s()),
            "looked_at": self._care.to_document(self._clock.monotonic_s()),
        }

    def load(self, document: dict[str, Any]) -> None:
        """Takes over an earlier process's."""
        now_s = self._clock.monotonic_s()
        elapsed_s = max(0.0, self._clock.wall_s() - document["wall_s"])
        self._core.supply.load(document["supply"], now_s, elapsed_s)
        self._core.leads.load(document["leads"])
        self._meters.load(document["demand"], now_s)
        self._care.load(document["looked_at"], now_s, elapsed_s)
