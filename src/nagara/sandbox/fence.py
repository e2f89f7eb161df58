"""Which lease may run what in the slots of this machine, and when leases end.

`Fence` is pure: it belongs to the machine's keeper, is told readings of the boot-time clock
(which counts suspension), and says what must be ended. The other end of a lease, which says from
when a slot may be granted again, is the pool's `LeaseClock`.

A slot is `MACHINE/DEVICE+DEVICE...`; two slots that share a device exclude each other. MACHINE is
what the pool calls this one. Leases of two names are never held at once: a start for a machine that
had our address before us must not run beside a replica of our own.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

LONGEST_TTL_S = 3600.0  # an end further away was not counted from this machine's present clock


class Terms(Protocol):
    """A lease as it is sent to its machine: it ends at `mark_s` + `ttl_s` of that one's clock."""

    @property
    def slot(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def mark_s(self) -> float: ...
    @property
    def ttl_s(self) -> float: ...


class Named(Protocol):
    """A lease by its slot and epoch."""

    @property
    def slot(self) -> str: ...
    @property
    def epoch(self) -> int: ...


def devices_of(slot: str) -> frozenset[str]:
    """`m1/0+2` → `m1/0` and `m1/2`; a slot of another form is one device."""
    machine, mark, devices = slot.rpartition("/")
    return frozenset(f"{machine}{mark}{device}" for device in devices.split("+"))


def machine_of(slot: str) -> str:
    """`m1/0+2` → `m1`; empty for a slot of another form."""
    return slot.rpartition("/")[0]


@dataclass(slots=True)
class _Held:
    epoch: int
    end_s: float


class Fence:
    """One machine's memory of which epoch of each device is the newest, and when leases end.

    Every reading is of one clock that never goes back.
    """

    def __init__(self, newest: dict[str, int] | None = None) -> None:
        self.newest: dict[str, int] = dict(newest or {})  # by device
        self._held: dict[str, _Held] = {}

    def admits(self, slot: str, epoch: int) -> bool:
        """Whether a call that carries this epoch may still act on the slot."""
        return all(self.newest.get(device, 0) <= epoch for device in devices_of(slot))

    def begin(self, lease: Terms, now_s: float) -> tuple[str, ...] | None:
        """A start under a lease: what must be ended before it.

        None: it must not be started; its epoch is old, or its time is over already, or its end
        was counted from a clock that is not this one, or it is for a machine of another name than
        the leases that are held.
        """
        end_s = lease.mark_s + lease.ttl_s
        is_in_time = now_s < end_s <= now_s + LONGEST_TTL_S or math.isinf(end_s)
        if not self.admits(lease.slot, lease.epoch) or not is_in_time:
            return None
        if self._is_foreign(lease.slot):
            return None
        old = self.raise_to(lease.slot, lease.epoch)
        self._held[lease.slot] = _Held(lease.epoch, end_s)
        return old

    def _is_foreign(self, slot: str) -> bool:
        names = {machine_of(slot), *map(machine_of, self._held)} - {""}
        return len(names) > 1

    def raise_to(self, slot: str, epoch: int) -> tuple[str, ...]:
        """Refuses epochs below `epoch` from now on; returns held slots that must be ended.

        With one more than a lease's epoch it ends that lease for good: a start that is still on
        its way will not be followed. Only that confirms the end of a lease.
        """
        for device in devices_of(slot):
            self.newest[device] = max(self.newest.get(device, 0), epoch)
        old = tuple(name for name, held in self._held.items() if not self.admits(name, held.epoch))
        for name in old:
            del self._held[name]
        return old

    def renew(self, renewals: Iterable[Terms], now_s: float) -> tuple[str, ...]:
        """Prolongs; returns slots that were not. A lease that has ended stays ended."""
        refused = []
        for renewal in renewals:
            held = self._held.get(renewal.slot)
            if held is None or held.epoch != renewal.epoch or held.end_s <= now_s:
                refused.append(renewal.slot)
            else:
                end_s = renewal.mark_s + renewal.ttl_s
                held.end_s = max(held.end_s, min(end_s, now_s + LONGEST_TTL_S))
        return tuple(refused)

    def end(self, lease: Named) -> None:
        """The replica under this lease has ended."""
        held = self._held.get(lease.slot)
        if held is not None and held.epoch == lease.epoch:
            del self._held[lease.slot]

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Slots whose time is over: the caller ends their processes before anything else."""
        over = tuple(slot for slot, held in self._held.items() if held.end_s <= now_s)
        for slot in over:
            del self._held[slot]
        return over

    def next_end_s(self) -> float | None:
        """When `expire` is due next; None while no lease has an end."""
        first_s = min((held.end_s for held in self._held.values()), default=math.inf)
        return None if math.isinf(first_s) else first_s
