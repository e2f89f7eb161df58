"""How long machines take from order to readiness, by offering. Pure."""

from collections import deque
from dataclasses import dataclass, field

FIRST_GUESS_S = 300.0
_REMEMBERED = 32
_QUANTILE = 0.9


@dataclass(slots=True)
class LeadTimes:
    """The last few lead times of every offering."""

    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, offering: str, lead_s: float) -> None:
        """A machine became ready after so long."""
        self._seen.setdefault(offering, deque(maxlen=_REMEMBERED)).append(lead_s)

    def to_document(self) -> dict[str, list[float]]:
        """As JSON."""
        return {offering: list(seen) for offering, seen in self._seen.items()}

    def load(self, document: dict[str, list[float]]) -> None:
        """Takes over what an earlier process has seen."""
        self._seen = {k: deque(seen, maxlen=_REMEMBERED) for k, seen in document.items()}

    def typical_s(self, offering: str) -> float:
        """What nine of ten machines stay below; of any offering if none of this has come yet."""
        seen = self._seen.get(offering)
        return self.refill_s() if not seen else _quantile(seen)

    def refill_s(self) -> float:
        """What nine of ten machines of any offering stay below."""
        together = [lead for seen in self._seen.values() for lead in seen]
        return _quantile(together) if together else FIRST_GUESS_S


def _quantile(values: deque[float] | list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]
