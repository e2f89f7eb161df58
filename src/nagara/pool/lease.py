"""Who may run in which slot: names of slots, and the two ends of a lease with a time limit.

`Fence` is the machine's end: it belongs to the machine's keeper, reads that machine's boot-time
clock (which counts suspension) and says what must be ended. `LeaseClock` is the pool's end: it
says from when a slot whose holder does not answer may be granted again.

    machine            pool
       ◀───renew(mark₀)──        the lease now ends at mark₀ + TTL on the machine's clock
       ──answer(mark₁)──▶        received at t₁: mark₁ was read before t₁
       ◀───renew(mark₁)──        may be late by any amount: the end is mark₁ + TTL all the same
                                 so the machine has ended the replica by t₁ + TTL (+ skew)

Renewals that count from their arrival would not do: one that was held up in a cut network
connection would prolong a lease after its slot was granted to somebody else.
"""

from dataclasses import dataclass

from nagara.contract.machine import Renewal, RenewalAnswer
from nagara.contract.replica import Lease

TTL_S = 15.0
RENEW_EVERY_S = 3.0
SKEW_S = 2.0  # two clocks' difference over one TTL, with plenty to spare


def slot_name(machine: str, devices: tuple[int, ...]) -> str:
    """`("m1", (0, 2))` → `m1/0+2`."""
    return f"{machine}/{'+'.join(map(str, devices))}"


def split_slot(slot: str) -> tuple[str, tuple[int, ...]]:
    """The inverse of `slot_name`."""
    machine, _, devices = slot.rpartition("/")
    return machine, tuple(int(device) for device in devices.split("+"))


@dataclass(slots=True)
class _Held:
    epoch: int
    end_s: float


class Fence:
    """One machine's memory of which epoch of each device is the newest, and when leases end.

    Every reading is of one clock that never goes back.
    """

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._held: dict[str, _Held] = {}

    def admits(self, slot: str, epoch: int) -> bool:
        """Whether a call that carries this epoch may still act on the slot."""
        _, devices = split_slot(slot)
        return all(self._newest.get(device, 0) <= epoch for device in devices)

    def begin(self, lease: Renewal, now_s: float) -> tuple[str, ...] | None:
        """A start under a lease: what must be ended before it.

        None: it must not be started; its epoch is old, or its time is over already.
        """
        end_s = lease.mark_s + lease.ttl_s
        if not self.admits(lease.slot, lease.epoch) or end_s <= now_s:
            return None
        old = self.raise_to(lease.slot, lease.epoch)
        self._held[lease.slot] = _Held(lease.epoch, end_s)
        return old

    def raise_to(self, slot: str, epoch: int) -> tuple[str, ...]:
        """Refuses epochs below `epoch` from now on; returns held slots that must be ended.

        With one more than a lease's epoch it ends that lease for good: a start that is still on
        its way will not be followed. Only that confirms the end of a lease.
        """
        _, devices = split_slot(slot)
        for device in devices:
            self._newest[device] = max(self._newest.get(device, 0), epoch)
        old = tuple(name for name, held in self._held.items() if not self.admits(name, held.epoch))
        for name in old:
            del self._held[name]
        return old

    def renew(self, renewals: tuple[Renewal, ...], now_s: float) -> RenewalAnswer:
        """Prolongs; a lease that has ended is not brought back to life."""
        refused = []
        for renewal in renewals:
            held = self._held.get(renewal.slot)
            if held is None or held.epoch != renewal.epoch or held.end_s <= now_s:
                refused.append(renewal.slot)
            else:
                held.end_s = max(held.end_s, renewal.mark_s + renewal.ttl_s)
        return RenewalAnswer(mark_s=now_s, refused=tuple(refused))

    def end(self, lease: Lease) -> None:
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
        """When `expire` is due next."""
        return min((held.end_s for held in self._held.values()), default=None)


class LeaseClock:
    """The pool's view of one machine's clock: marks received, marks sent on.

    Readings are of the pool's own boot-time clock unless named `mark_s`.
    """

    __slots__ = ("_mark_received_s", "_mark_s", "_sent_received_s")

    def __init__(self) -> None:
        self._mark_s: float | None = None
        self._mark_received_s = 0.0
        self._sent_received_s: float | None = None

    def received(self, mark_s: float, now_s: float) -> None:
        """The machine told a reading of its clock."""
        if self._mark_s is None or mark_s > self._mark_s:
            self._mark_s, self._mark_received_s = mark_s, now_s

    def to_send(self) -> float | None:
        """The mark for the next renewal or start; None before the first answer."""
        if self._mark_s is not None:
            self._sent_received_s = self._mark_received_s
        return self._mark_s

    def free_at_s(self, now_s: float, ttl_s: float = TTL_S) -> float:
        """From when on nothing runs under this machine's leases unless it has been renewed.

        `now_s` counts as the last renewal where nothing is known (after a restart of the pool).
        """
        sent_s = now_s if self._sent_received_s is None else self._sent_received_s
        return sent_s + ttl_s + SKEW_S
