"""What a provider really gives: grants and refusals seen, by offering, old ones fading.

Advertised stock is only an upper bound. An offering nobody has tried gets one machine; each
grant allows one more at a time, so that rounds of launches double; a refusal for want of
capacity closes the offering, and after a pause that doubles too, one machine is tried again.
Machines that were granted and never came up count against an offering in the same way. Pure:
times are given, on a clock that never jumps.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from nagara.contract.machine import Offering
from nagara.pool.machines import Machine
from nagara.pool.states import RUNNING

HALF_LIFE_S = 1500.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 1800.0
MAX_LIMIT = 256.0
_Z_LOW = 1.2816  # the 10 % quantile of a normal distribution
_PRIOR_GRANTS = 4.0  # orders believed granted before any was seen
_PRIOR_BOOTS = 4.0  # boots believed good before any was seen
_NEARLY = 0.25  # a limit that has faded for a moment is still that limit
_PROVEN = 0.25  # of one boot, faded: about two half-lives
_MIN_BOOT_SUCCESS = 0.05
MAX_RECLAIM_LOSS = 0.9


@dataclass(slots=True)
class _Seen:
    granted: float = 0.0
    refused: float = 0.0
    boots: float = 0.0
    failed_boots: float = 0.0
    reclaims: float = 0.0
    hours: float = 0.0  # machine hours, faded like the rest
    limit: float = 1.0
    at_s: float = 0.0  # when the figures above were last faded
    closed_until_s: float = -math.inf
    pause_s: float = FIRST_PAUSE_S
    why_closed: str = ""

    def fade(self, now_s: float) -> None:
        passed_s = now_s - self.at_s
        if passed_s <= 0:
            return
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self.granted *= kept
        self.refused *= kept
        self.boots *= kept
        self.failed_boots *= kept
        self.reclaims *= kept
        self.hours *= kept
        self.limit = 1 + (self.limit - 1) * kept
        self.at_s = now_s


@dataclass(slots=True)
class Supply:
    """Observations of all offerings."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def granted(self, offering: str, now_s: float) -> None:
        """A launch was accepted."""
        seen = self._at(offering, now_s)
        seen.granted += 1
        seen.limit = min(MAX_LIMIT, seen.limit + 1)
        seen.closed_until_s = -math.inf

    def refused(self, offering: str, why: str, now_s: float) -> None:
        """A launch was refused, or its outcome is unknown: look elsewhere for a while."""
        seen = self._at(offering, now_s)
        seen.refused += 1
        self._close(seen, why, now_s)

    def booted(self, offering: str, now_s: float) -> None:
        """A machine passed its boot checks: what it proves ends the doubling of pauses."""
        seen = self._at(offering, now_s)
        seen.boots += 1
        seen.pause_s = FIRST_PAUSE_S

    def failed_boot(self, offering: str, why: str, now_s: float) -> None:
        """A machine was granted and was no use."""
        seen = self._at(offering, now_s)
        seen.failed_boots += 1
        if seen.failed_boots > seen.boots:
            self._close(seen, why, now_s)
        else:
            seen.limit = max(1.0, seen.limit / 2)

    def reclaimed(self, offering: str, now_s: float) -> None:
        """A machine was taken away by its provider."""
        self._at(offering, now_s).reclaims += 1

    def ran(self, offering: str, machine_hours: float, now_s: float) -> None:
        """Machines of the offering ran for so many hours together."""
        self._at(offering, now_s).hours += machine_hours

    def ran_since(self, machines: Iterable[Machine], since_s: float, now_s: float) -> None:
        """All these machines have been in the pool from `since_s` to now; those that run count."""
        running = Counter(one.offering.id for one in machines if one.state in RUNNING)
        for offering, count in running.items():
            self.ran(offering, count * max(0.0, now_s - since_s) / 3600, now_s)

    def usable(self, offering: Offering, now_s: float) -> int:
        """How many machines a plan may ask for now: what would be granted nine times in ten."""
        stock = math.inf if offering.stock is None else offering.stock
        seen = self._seen.get(offering.id)
        if seen is None:
            return int(min(1, stock))
        seen.fade(now_s)
        if now_s < seen.closed_until_s:
            return 0
        return int(min(max(1, math.floor(seen.limit * _low_share(seen) + _NEARLY)), stock))

    def boot_success(self, offering: str, now_s: float) -> float:
        """Share of granted machines that come up."""
        seen = self._seen.get(offering)
        if seen is None:
            return 1.0
        seen.fade(now_s)
        tried = seen.boots + seen.failed_boots + _PRIOR_BOOTS
        return max(_MIN_BOOT_SUCCESS, (seen.boots + _PRIOR_BOOTS) / tried)

    def chance(self, offering: str, now_s: float) -> float:
        """How likely orders of now are granted, as it has been of late.

        Machines that are granted and do not come up are another matter: they fail one by one,
        and the mean of many is what is expected of them.
        """
        seen = self._seen.get(offering)
        if seen is None:
            return 1.0
        seen.fade(now_s)
        asked = seen.granted + seen.refused + _PRIOR_GRANTS
        return (seen.granted + _PRIOR_GRANTS) / asked

    def is_proven(self, offering: str, now_s: float) -> bool:
        """Whether a machine of it has come up lately."""
        seen = self._seen.get(offering)
        if seen is None:
            return False
        seen.fade(now_s)
        return seen.boots >= _PROVEN

    def effective_price_h(self, offering: Offering, lead_s: float, now_s: float) -> float:
        """List price per hour that is of use: machines that never come or are taken away cost."""
        seen = self._seen.get(offering.id)
        loss = 0.0
        if seen is not None and seen.reclaims:
            seen.fade(now_s)
            per_hour = seen.reclaims / max(seen.hours, 1.0)
            loss = min(MAX_RECLAIM_LOSS, per_hour * lead_s / 3600)
        return offering.price_h / self.boot_success(offering.id, now_s) / (1 - loss)

    def why_closed(self, offering: str, now_s: float) -> str | None:
        """The refusal that keeps an offering out of plans at present, or None."""
        seen = self._seen.get(offering)
        return seen.why_closed if seen is not None and now_s < seen.closed_until_s else None

    def to_document(self, now_s: float) -> dict[str, Any]:
        """As JSON, in ages instead of readings of a clock."""
        documents = {}
        for offering, seen in self._seen.items():
            seen.fade(now_s)
            document = asdict(seen)
            del document["at_s"]
            document["closed_until_s"] = max(0.0, seen.closed_until_s - now_s)
            documents[offering] = document
        return documents

    def load(self, documents: dict[str, Any], now_s: float, elapsed_s: float) -> None:
        """Takes over what was observed `elapsed_s` before now."""
        for offering, document in documents.items():
            left_s = document["closed_until_s"] - elapsed_s
            seen = _Seen(**document, at_s=now_s - elapsed_s)
            seen.closed_until_s = now_s + left_s if left_s > 0 else -math.inf
            seen.fade(now_s)
            self._seen[offering] = seen

    def _at(self, offering: str, now_s: float) -> _Seen:
        seen = self._seen.setdefault(offering, _Seen(at_s=now_s))
        seen.fade(now_s)
        return seen

    def _close(self, seen: _Seen, why: str, now_s: float) -> None:
        if now_s >= seen.closed_until_s:  # refusals of one round are one
            seen.closed_until_s = now_s + seen.pause_s
            seen.pause_s = min(LONGEST_PAUSE_S, 2 * seen.pause_s)
        seen.limit = 1.0
        seen.why_closed = why


def _low_share(seen: _Seen) -> float:
    """Lower end of the score interval (E. B. Wilson, 1927) for the share that is granted."""
    count = seen.granted + seen.refused
    if count < 1e-9 or seen.refused < 0.05:
        return 1.0
    share = seen.granted / count
    z2 = _Z_LOW**2
    middle = share + z2 / (2 * count)
    spread = _Z_LOW * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, (middle - spread) / (1 + z2 / count))
