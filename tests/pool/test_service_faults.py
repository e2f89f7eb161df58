"""The pool at work when what is around it fails."""

import pytest

from nagara.pool.actions import NoSlot
from nagara.pool.demandclass import ANY
from nagara.pool.machines import Writes
from nagara.testing.pools import MemoryRecord

from .service_world import APP, a_world, claimed, filled


class BrokenRecord(MemoryRecord):
    """A record that cannot be written for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    async def write(self, writes: Writes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        await super().write(writes)


async def test_what_could_not_be_written_is_neither_done_nor_forgotten() -> None:
    record = BrokenRecord()
    async with a_world(record=record) as world:
        await filled(world)
        machines = set(world.market.machines)
        granted = await claimed(world)
        record.is_full = True
        other = world.service.claim(APP, ANY)
        assert not isinstance(other, NoSlot)
        with pytest.raises(OSError, match="No space"):
            await world.service.durable()
        offering = world.service.core.table.named(other.machine).offering
        world.service.core.request(offering, world.clock.monotonic_s())
        await world.pass_s(20)
        assert set(world.market.machines) == machines  # nothing was launched unrecorded
        record.is_full = False
        await world.pass_s(10)
        assert len(world.market.machines) > len(machines)
        saved = await record.read()
        assert {one.slot for one in saved.leases if one.app} == {
            granted.lease.slot, other.lease.slot,
        }  # fmt: skip
        assert {one.name for one in saved.machines} == {
            one.name for one in world.service.core.table
        }
