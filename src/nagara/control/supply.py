"""Slots for those who need one: at once, or when one that is being freed is free.

Stands between the fleet and the pool. Called on the loop; only `claim` waits.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nagara.contract.replica import Lease
from nagara.control.app import App
from nagara.control.errors import ControlError
from nagara.control.zone import OWN
from nagara.pool.actions import NoSlot


class NoSupplyError(ControlError):
    """No slot is free that the app may use, and none is being freed.

    `retry_after_s`: when a machine that is on its way is expected, or a few seconds.
    """

    retry_after_s: float = 5.0


class Lender(Protocol):
    """Where slots come from."""

    def expect(self, app: App) -> None:
        """The app is deployed: its replicas will want slots."""
        ...

    def claim(self, app: App) -> Lease | NoSlot:
        """A slot for a replica, at once."""
        ...

    def claim_here(self, app: App) -> Lease | None:
        """A slot of this machine, if one is free."""
        ...

    def claim_on(self, app: App, machine: str) -> Lease | None:
        """A slot of the machine of that name, if one is free."""
        ...

    async def durable(self) -> None:
        """Returns when everything claimed before is written down."""
        ...

    def release(self, lease: Lease) -> None:
        """The replica is gone for certain."""
        ...

    def adopt(self, lease: Lease, app: App) -> bool:
        """A replica of an earlier process goes on; False if it may not."""
        ...


class Supply:
    """A queue before the pool's slots.

    Args:
        freeing: how many slots are being given up at present.
        make_room: begins to free one more slot for an app that needs one; False if none can be.
            Its argument says whether another app's idle replica may be given up for it.
    """

    def __init__(
        self, lender: Lender, freeing: Callable[[], int], make_room: Callable[[bool], bool]
    ) -> None:
        self._lender = lender
        self._freeing = freeing
        self._make_room = make_room
        self._waiting: deque[tuple[App, asyncio.Future[Lease]]] = deque()

    async def claim(self, app: App, *, may_evict: bool) -> Lease:
        """A lease, at once if a slot is free.

        Raises:
            NoSupplyError: none is free and none will be soon.
        """
        refusal: NoSlot | None = None
        if not self._waiting:
            granted = self._lender.claim(app)
            if isinstance(granted, Lease):
                return granted
            refusal = granted
        if len(self._waiting) >= self._freeing() and not self._make_room(may_evict):
            raise _no_supply(refusal)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting.append((app, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def claim_spare(self, app: App, machine: str) -> Lease | None:
        """A lease of that machine, or of this one if it is `OWN`, that nobody else waits for."""
        if self._waiting:
            return None
        if machine == OWN:
            return self._lender.claim_here(app)
        return self._lender.claim_on(app, machine)

    async def durable(self) -> None:
        """Returns when what was claimed before may be used."""
        await self._lender.durable()

    def release(self, lease: Lease) -> None:
        """Gives a slot back, or on to the first who waits."""
        self._lender.release(lease)
        self.hand_on()

    def hand_on(self) -> None:
        """Slots may have become free: the first who wait get them."""
        while self._waiting:
            app, future = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            granted = self._lender.claim(app)
            if not isinstance(granted, Lease):
                return
            self._waiting.popleft()
            future.set_result(granted)

    def adopt(self, lease: Lease, app: App) -> bool:
        """Takes note of a lease granted by an earlier process."""
        return self._lender.adopt(lease, app)


def _no_supply(refusal: NoSlot | None) -> NoSupplyError:
    because = "others wait for the slots that become free" if refusal is None else refusal.because
    error = NoSupplyError(
        f"no slot for it: {because}",
        hint="give nagara more slots, or wait until another app is idle",
    )
    if refusal is not None and refusal.earliest_s is not None:
        error.retry_after_s = max(1.0, math.ceil(refusal.earliest_s))
    return error
