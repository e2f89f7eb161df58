"""Slots handed on to those who wait."""

import asyncio
from typing import Any

import pytest

from nagara.contract.replica import Lease
from nagara.control.app import App
from nagara.control.appfile import parse_apps
from nagara.control.supply import NoSupplyError, Supply
from nagara.control.zone import OWN
from nagara.pool.actions import NoSlot

(APP,) = parse_apps('[app.a]\nimage = "host"\ncommand = ["x", "${PORT}"]\n', "app.toml")


class OneSlot:
    """Lends one slot."""

    def __init__(self, earliest_s: float | None = None) -> None:
        self.earliest_s = earliest_s
        self.held: Lease | None = None
        self.epoch = 0

    def expect(self, app: App) -> None: ...

    def claim(self, app: App) -> Lease | NoSlot:
        if self.held is not None:
            return NoSlot("all is taken", self.earliest_s)
        self.epoch += 1
        self.held = Lease("m/0", self.epoch)
        return self.held

    def claim_on(self, app: App, machine: str) -> Lease | None:
        raise AssertionError("there is no other machine")

    def claim_here(self, app: App) -> Lease | None:
        lease = self.claim(app)
        return lease if isinstance(lease, Lease) else None

    async def durable(self) -> None: ...

    def release(self, lease: Lease) -> None:
        assert self.held == lease
        self.held = None

    def adopt(self, lease: Lease, app: App) -> bool:
        return False


def a_supply(freeing: Any, make_room: Any, earliest_s: float | None = None) -> Supply:
    return Supply(OneSlot(earliest_s), freeing, make_room)


async def test_a_freed_slot_goes_to_the_first_who_waits() -> None:
    supply = a_supply(lambda: 2, lambda may_evict: False)
    lease = await supply.claim(APP, may_evict=False)
    first = asyncio.create_task(supply.claim(APP, may_evict=False))
    second = asyncio.create_task(supply.claim(APP, may_evict=False))
    await asyncio.sleep(0)
    assert supply.claim_spare(APP, OWN) is None
    supply.release(lease)
    assert (await first).slot == lease.slot
    assert not second.done()
    supply.release(await first)
    await second


async def test_who_stops_waiting_takes_nothing_along() -> None:
    supply = a_supply(lambda: 2, lambda may_evict: False)
    lease = await supply.claim(APP, may_evict=False)
    leaving = asyncio.create_task(supply.claim(APP, may_evict=False))
    staying = asyncio.create_task(supply.claim(APP, may_evict=False))
    await asyncio.sleep(0)
    supply.release(lease)
    leaving.cancel()  # in the turn of the loop in which it was granted
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.wait_for(staying, 1)


async def test_room_is_made_once_for_each_who_waits() -> None:
    asked = []
    freeing = 0

    def make_room(may_evict: bool) -> bool:
        nonlocal freeing
        asked.append(may_evict)
        freeing += 1
        return len(asked) < 3

    supply = a_supply(lambda: freeing, make_room)
    lease = await supply.claim(APP, may_evict=True)
    waiting = [asyncio.create_task(supply.claim(APP, may_evict=True)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NoSupplyError, match="others wait"):
        await supply.claim(APP, may_evict=False)
    assert asked == [True, True, False]
    supply.release(lease)
    for task in waiting:
        supply.release(await task)
    assert supply.claim_spare(APP, OWN) is not None


async def test_slots_that_come_from_elsewhere_are_handed_on_too() -> None:
    lender = OneSlot()
    supply = Supply(lender, lambda: 1, lambda may_evict: False)
    await supply.claim(APP, may_evict=False)
    waiting = asyncio.create_task(supply.claim(APP, may_evict=False))
    await asyncio.sleep(0)
    lender.held = None  # a new machine has become ready
    supply.hand_on()
    assert (await waiting).epoch == 2


async def test_a_refusal_says_why_and_when_to_ask_again() -> None:
    supply = a_supply(lambda: 0, lambda may_evict: False, earliest_s=41.2)
    await supply.claim(APP, may_evict=False)
    with pytest.raises(NoSupplyError, match="all is taken") as refused:
        await supply.claim(APP, may_evict=False)
    assert refused.value.retry_after_s == 42
