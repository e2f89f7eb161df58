"""Who goes first when there are fewer slots than claims.

A claim that found nothing is remembered for a while. A later claim is granted only if enough is
free for everybody who goes before it: those of higher priority, then those who hold less of
their weighted share. Pure: times are given.
"""

from dataclasses import dataclass

REMEMBERED_S = 10.0  # claimants ask again every second while they want something


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims. More weight, more share; a higher priority goes first whatever the share."""

    app: str
    priority: int = 0
    weight: float = 1.0


@dataclass(slots=True)
class _Unserved:
    claimant: Claimant
    count: int
    last_s: float


class Arbiter:
    """Remembers unserved claims and how much each app holds."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._unserved: dict[str, _Unserved] = {}

    def missed(self, claimant: Claimant, count: int, now_s: float) -> None:
        """`count` claims of the app stand unserved now (not: were added)."""
        self._unserved[claimant.app] = _Unserved(claimant, count, now_s)

    def served(self, app: str) -> None:
        """One claim of the app was granted."""
        self.held[app] = self.held.get(app, 0) + 1
        waiting = self._unserved.get(app)
        if waiting is not None:
            waiting.count -= 1
            if waiting.count <= 0:
                del self._unserved[app]

    def gave_back(self, app: str) -> None:
        """One lease of the app has ended."""
        left = self.held.get(app, 0) - 1
        if left > 0:
            self.held[app] = left
        else:
            self.held.pop(app, None)

    def ahead_of(self, claimant: Claimant, now_s: float) -> int:
        """How many slots others may take before this claimant takes one."""
        if not self._unserved:
            return 0
        for app in [a for a, w in self._unserved.items() if now_s - w.last_s > REMEMBERED_S]:
            del self._unserved[app]
        mine = self._share(claimant, 1)
        ahead = 0
        for waiting in self._unserved.values():
            other = waiting.claimant
            if other.app == claimant.app or other.priority < claimant.priority:
                continue
            if other.priority > claimant.priority:
                ahead += waiting.count
            else:
                ahead += sum(self._share(other, nth) < mine for nth in range(1, waiting.count + 1))
        return ahead

    def _share(self, claimant: Claimant, more: int) -> float:
        return (self.held.get(claimant.app, 0) + more) / claimant.weight
