"""What every reserved second of a slot was spent on.

A replica's slot is reserved from its claim until it is given back, and is at each moment in one
of these:

    starting    not ready yet
    busy        at least one request runs
    buffer      idle, and one of those that `scale.min` and `scale.buffer` keep
    keep_alive  idle, kept in case another request comes
    draining    its route is gone and no request runs: it is being ended
    capture     a snapshot is being made

**Allocation utilisation** is the busy share of the whole. Changed on the loop; times are
monotonic seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Use(StrEnum):
    """What a reserved slot is used for."""

    STARTING = "starting"
    BUSY = "busy"
    BUFFER = "buffer"
    KEEP_ALIVE = "keep_alive"
    DRAINING = "draining"
    CAPTURE = "capture"


@dataclass(slots=True)
class _Slot:
    app: str
    use: Use
    since_s: float


@dataclass(slots=True)
class Occupancy:
    """The accounts of all apps. A replica without an account is not reserved."""

    _slots: dict[str, _Slot] = field(default_factory=dict)  # by replica
    _spent_s: dict[str, dict[Use, float]] = field(default_factory=dict)  # by app

    def begin(self, replica: str, app: str, use: Use, now_s: float) -> None:
        """The replica's slot is reserved."""
        self._slots[replica] = _Slot(app, use, now_s)

    def turn(self, replica: str, use: Use, now_s: float) -> None:
        """From now on it is used for something else."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._book(slot, now_s)
            slot.use = use

    def end(self, replica: str, now_s: float) -> None:
        """The slot is given back."""
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._book(slot, now_s)

    def forget(self, app: str) -> None:
        """The app was deleted."""
        self._spent_s.pop(app, None)

    def spent_s(self, now_s: float) -> dict[str, dict[Use, float]]:
        """Seconds by app and use, those that are still running included."""
        for slot in self._slots.values():
            self._book(slot, now_s)
        return {app: dict(uses) for app, uses in self._spent_s.items()}

    def _book(self, slot: _Slot, now_s: float) -> None:
        uses = self._spent_s.setdefault(slot.app, {})
        uses[slot.use] = uses.get(slot.use, 0.0) + max(0.0, now_s - slot.since_s)
        slot.since_s = now_s


def utilisation(uses: Mapping[Use, float]) -> float | None:
    """The busy share; None if nothing was reserved."""
    reserved_s = sum(uses.values())
    return uses.get(Use.BUSY, 0.0) / reserved_s if reserved_s > 0 else None
