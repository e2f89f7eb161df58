"""Slots for those who need one: at once, or when one that is being freed is free.

Stands between the fleet and the pool. Called on the loop; only `claim` waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from nagara.contract.replica import Lease
from nagara.control.errors import ControlError
from nagara.pool.slots import Slots


class NoSupplyError(ControlError):
    """All slots are taken by replicas with work, and none is being freed."""


class Supply:
    """A queue before the pool's slots.

    Args:
        freeing: how many slots are being given up at present.
        make_room: begins to free one more slot for an app that needs one; False if none can be.
            Its argument says whether another app's idle replica may be given up for it.
    """

    def __init__(
        self, slots: Slots, freeing: Callable[[], int], make_room: Callable[[bool], bool]
    ) -> None:
        self._slots = slots
        self._freeing = freeing
        self._make_room = make_room
        self._waiting: deque[asyncio.Future[Lease]] = deque()

    async def claim(self, *, may_evict: bool) -> Lease:
        """A lease, at once if a slot is free.

        Raises:
            NoSupplyError: none is free and none will be soon.
        """
        lease = self.claim_spare()
        if lease is not None:
            return lease
        if len(self._waiting) >= self._freeing() and not self._make_room(may_evict):
            raise NoSupplyError(
                f"all {self._slots.count} slots are in use",
                hint="give nagara more slots, or wait until another app is idle",
            )
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def claim_spare(self) -> Lease | None:
        """A lease that nobody else waits for, or None."""
        return None if self._waiting else self._slots.claim()

    def release(self, lease: Lease) -> None:
        """Gives a slot back, or on to the first who waits."""
        self._slots.release(lease)
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            granted = self._slots.claim()
            if granted is None:
                return
            self._waiting.popleft().set_result(granted)

    def adopt(self, lease: Lease) -> bool:
        """Takes note of a lease granted by an earlier process."""
        return self._slots.adopt(lease)
