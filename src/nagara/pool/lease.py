"""Who may run in which slot: names of slots, and the two ends of a lease with a time limit.

The machine's end of a lease is its keeper's: it reads that machine's boot-time clock (which counts
suspension) and ends what must be ended. `LeaseClock` is the pool's end: it says from when a slot
whose holder does not answer may be granted again.

    machine            pool
       ◀───renew(mark₀)──        the lease now ends at mark₀ + TTL on the machine's clock
       ──answer(mark₁)──▶        received at t₁: mark₁ was read before t₁
       ◀───renew(mark₁)──        may be late by any amount: the end is mark₁ + TTL all the same
                                 so the machine has ended the replica by t₁ + TTL (+ skew)

Renewals that count from their arrival would not do: one that was held up in a cut network
connection would prolong a lease after its slot was granted to somebody else.
"""

import math

from nagara.contract.replica import Lease

TTL_S = 15.0
RENEW_EVERY_S = 3.0
SKEW_S = 2.0  # two clocks' difference over one TTL, with plenty to spare


def slot_name(machine: str, devices: tuple[int, ...]) -> str:
    """`("m1", (0, 2))` → `m1/0+2`."""
    return f"{machine}/{'+'.join(map(str, devices))}"


def machine_of(slot: str) -> str:
    """The machine of a slot, whatever form its devices have."""
    return slot.rpartition("/")[0]


def same_grant(one: Lease | None, other: Lease) -> bool:
    """Whether both are of one grant, whatever is said of its end."""
    return one is not None and one.slot == other.slot and one.epoch == other.epoch


def split_slot(slot: str) -> tuple[str, tuple[int, ...]]:
    """The inverse of `slot_name`."""
    machine, _, devices = slot.rpartition("/")
    return machine, tuple(int(device) for device in devices.split("+"))


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

    def to_send(self, now_s: float) -> float | None:
        """The mark for the next renewal or start; None where none is young enough to be of use."""
        if self._mark_s is None or now_s >= self._mark_received_s + TTL_S:
            return None
        self._sent_received_s = self._mark_received_s
        return self._mark_s

    def rest(self) -> None:
        """No lease is out: silence means nothing."""
        self._sent_received_s = None

    @property
    def over_at_s(self) -> float:
        """When every lease of a machine that stays silent is over; infinite if none was sent."""
        return math.inf if self._sent_received_s is None else self._sent_received_s + TTL_S + SKEW_S

    def free_at_s(self, now_s: float, ttl_s: float = TTL_S) -> float:
        """From when on nothing runs under this machine's leases unless it has been renewed.

        `now_s` counts as the last renewal where nothing is known (after a restart of the pool).
        """
        sent_s = now_s if self._sent_received_s is None else self._sent_received_s
        return sent_s + ttl_s + SKEW_S
