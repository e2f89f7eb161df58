"""How long an app's latest starts took, by kind, and what a request may wait by them. Pure."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nagara.contract.replica import StartKind

_KEPT = 20
_SHARE = 0.95


@dataclass(slots=True)
class RecentStarts:
    """The latest of each kind; `last_s` is the latest of all, None if there was none."""

    last_s: float | None = None
    _by_kind: dict[StartKind, deque[float]] = field(default_factory=dict)

    def add(self, kind: StartKind, seconds: float) -> None:
        """One more."""
        self.last_s = seconds
        self._by_kind.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)

    def clear(self) -> None:
        """What is started from now on is something else."""
        self.last_s = None
        self._by_kind.clear()

    def slow_s(self, kind: StartKind) -> float | None:
        """What 95 % of the starts of a kind stay within; None where nothing is known of it.

        A restored start that nobody has seen yet is not slower than the plain ones.
        """
        known = self._by_kind.get(kind)
        if known is None and kind is StartKind.RESTORED:
            known = self._by_kind.get(StartKind.PLAIN)
        return None if known is None else p95(known)


def p95(values: Iterable[float]) -> float:
    """The smallest of the values that at least 95 % of them do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(_SHARE * len(ordered)) - 1]
