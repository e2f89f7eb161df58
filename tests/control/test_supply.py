"""Slots handed on to those who wait."""

import asyncio

import pytest

from nagara.control.supply import NoSupplyError, Supply
from nagara.pool.slots import Slots


async def test_a_freed_slot_goes_to_the_first_who_waits() -> None:
    freeing = 2
    supply = Supply(Slots(1), lambda: freeing, lambda may_evict: False)
    lease = await supply.claim(may_evict=False)
    first = asyncio.create_task(supply.claim(may_evict=False))
    second = asyncio.create_task(supply.claim(may_evict=False))
    await asyncio.sleep(0)
    assert supply.claim_spare() is None
    supply.release(lease)
    assert (await first).slot == lease.slot
    assert not second.done()
    supply.release(await first)
    await second


async def test_who_stops_waiting_takes_nothing_along() -> None:
    supply = Supply(Slots(1), lambda: 2, lambda may_evict: False)
    lease = await supply.claim(may_evict=False)
    leaving = asyncio.create_task(supply.claim(may_evict=False))
    staying = asyncio.create_task(supply.claim(may_evict=False))
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

    supply = Supply(Slots(1), lambda: freeing, make_room)
    lease = await supply.claim(may_evict=True)
    waiting = [asyncio.create_task(supply.claim(may_evict=True)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NoSupplyError, match="all 1 slots are in use"):
        await supply.claim(may_evict=False)
    assert asked == [True, True, False]
    supply.release(lease)
    for task in waiting:
        supply.release(await task)
    assert supply.claim_spare() is not None
