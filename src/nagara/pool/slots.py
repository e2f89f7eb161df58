"""This machine's slots: how many replicas it may run, and who holds which.

Called from control's loop only. `claim` answers from memory. A lease on one machine has no end:
the kernel that runs the replica is the fence. Epochs rise with every grant of a slot, also over
restarts, so that an old lease is recognised.
"""

from collections.abc import Mapping

from nagara.contract.replica import Lease


class Slots:
    """A fixed number of equal slots.

    Args:
        count: replicas that may exist at once, capture replicas included.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError("a machine needs at least one slot")
        self._epochs = {f"local-{number}": 0 for number in range(count)}
        self._held: dict[str, Lease] = {}

    @property
    def count(self) -> int:
        """All slots, free or not. Taken-over leases of slots that no longer exist count not."""
        return len(self._epochs)

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return sum(slot not in self._held for slot in self._epochs)

    def claim(self) -> Lease | None:
        """A lease on a free slot, or None at once."""
        for slot in self._epochs:
            if slot not in self._held:
                return self._grant(slot)
        return None

    def release(self, lease: Lease) -> bool:
        """Gives the slot back. An old or unknown lease changes nothing and answers False."""
        if self._held.get(lease.slot) != lease:
            return False
        del self._held[lease.slot]
        return True

    def adopt(self, lease: Lease) -> bool:
        """Takes note of a lease granted by an earlier process.

        False if the slot is held by another lease already. A slot beyond the present count is
        held until its lease is released and never granted again.
        """
        if self._held.get(lease.slot, lease) != lease:
            return False
        self._held[lease.slot] = lease
        if lease.slot in self._epochs:
            self._epochs[lease.slot] = max(self._epochs[lease.slot], lease.epoch)
        return True

    def raise_epochs(self, highest: Mapping[str, int]) -> None:
        """New grants get epochs above these."""
        for slot in self._epochs:
            self._epochs[slot] = max(self._epochs[slot], highest.get(slot, 0))

    def _grant(self, slot: str) -> Lease:
        self._epochs[slot] += 1
        lease = Lease(slot=slot, epoch=self._epochs[slot])
        self._held[slot] = lease
        return lease
