"""The pool at work when what is around it fails."""

import asyncio
from typing import Any

import pytest

from nagara.contract.machine import CheckKind, MachineUnreachableError, ProviderError
from nagara.pool import asking
from nagara.pool.actions import NoSlot
from nagara.pool.demandclass import ANY
from nagara.pool.lease import SKEW_S, TTL_S
from nagara.pool.machines import Writes
from nagara.pool.providers.simulated import SimulatedProvider, Trait, a_market
from nagara.pool.states import MachineState
from nagara.testing.pools import MemoryRecord, an_offering

from .service_world import APP, World, a_world, begun, claimed, filled


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


CALLS = ["offerings", "launch", "release", "machines"]


class Broken(SimulatedProvider):
    """One that breaks in one of its methods, in a way nobody has thought of."""

    broken = ""
    error: Exception = ValueError("a field nobody has seen before")

    def __getattribute__(self, name: str) -> Any:
        if name != "broken" and name == self.broken:

            async def breaks(*_: object) -> None:
                raise type(self).error

            return breaks
        return super().__getattribute__(name)


@pytest.mark.parametrize("call", CALLS)
async def test_a_provider_that_breaks_costs_nobody_else_anything(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "broken", call)
    async with a_world() as world:
        cheap = a_market([(an_offering("b", provider="q", price_h=0.1), Trait())], name="q")
        broken = Broken(cheap, world.clock)
        others = world.service._carrier.providers
        world.service._carrier.providers = {"q": broken, **others}  # asked first
        await filled(world)
        ready = [one for one in world.service.core.table if one.state is MachineState.READY]
        assert {one.offering.id for one in ready} >= ({"b"} if call == "release" else {"a"})


async def test_an_error_nobody_knows_closes_an_offering_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Broken, "broken", "launch")
    async with a_world() as world:
        cheap = a_market([(an_offering("b", provider="q", price_h=0.1), Trait())], name="q")
        world.service.add_provider(Broken(cheap, world.clock))
        await world.pass_s(35)
        assert isinstance(world.service.claim(APP, ANY), NoSlot)
        await world.pass_s(40)
        now_s = world.clock.monotonic_s()
        assert "nobody has seen" in str(world.service.core.supply.why_closed("b", now_s))


async def test_machines_are_listed_also_by_a_provider_that_offers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Broken, "broken", "offerings")
    async with a_world() as world:
        cheap = a_market([(an_offering("b", provider="q"), Trait())], name="q")
        world.service.add_provider(Broken(cheap, world.clock))
        leaked = f"{world.service.core.prefix}-leaked"
        cheap.launch(leaked, "b")
        await world.pass_s(120)
        assert leaked not in cheap.machines


async def test_whatever_a_provider_raises_is_one_kind_of_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    async def breaks() -> None:
        raise KeyError("id")

    monkeypatch.setattr(asking, "PROVIDER_LIMIT_S", 0.01)
    with pytest.raises(ProviderError, match="no answer within"):
        await asking.of_provider("q", hangs())
    with pytest.raises(ProviderError, match="broke: KeyError"):
        await asking.of_provider("q", breaks())
    with pytest.raises(MachineUnreachableError, match="no use: KeyError"):
        await asking.of_machine("m", breaks(), 1.0)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that hang are waited for in the loop's own time."""
    for name in ("MARK_LIMIT_S", "FENCE_LIMIT_S", "VITALS_LIMIT_S"):
        monkeypatch.setattr(asking, name, 0.02)


async def until_hung(world: World, seconds: float) -> None:
    for _ in range(int(seconds)):
        await world.clock.advance(1.0)
        await asyncio.sleep(0.03)


@pytest.mark.usefixtures("short_limits")
async def test_an_agent_that_hangs_is_one_that_does_not_answer() -> None:
    async with a_world() as world:
        await filled(world)
        granted, other = await claimed(world), await claimed(world)
        agent = await begun(world, granted)
        agent.is_hung = True
        with pytest.raises(MachineUnreachableError, match="no answer within"):
            await world.service.terms(granted.lease)
        await world.service.fence(granted.lease)
        assert world.service.is_present(granted.lease)
        await until_hung(world, TTL_S + SKEW_S + 1)
        assert not world.service.is_present(granted.lease)
        assert world.service.core.table.named(granted.machine).is_silent
        assert other.machine == granted.machine or world.service.is_present(other.lease)


async def test_a_check_that_hangs_on_its_machine_ends_with_the_machines_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "MARK_LIMIT_S", 0.02)
    async with a_world() as world:
        await filled(world)
        name = next(one.name for one in world.service.core.table)
        world.agents[name].is_hung = True
        await world.service.diagnose(name, CheckKind.MEDIUM)
        await until_hung(world, 5)
        machine = world.service.core.table.named(name)
        assert machine.state is MachineState.DIAGNOSING
        world.agents[name].is_hung = False
        await until_hung(world, 5)
        assert machine.state is MachineState.READY


async def test_a_loop_that_fails_every_time_is_stuck_however_often_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_world() as world:
        await world.pass_s(60)
        assert world.service.document()["stuck"] == []

        async def breaks(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(world.service._setup.planning, "plan", breaks, raising=False)
        await world.pass_s(300)
        assert world.service.document()["stuck"] == ["plans"]
        assert sum("plans makes no progress" in one for one in world.service.care.alerts) == 1


async def test_after_an_hour_of_suspension_machines_are_there_and_leases_are_over() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        agent = await begun(world, granted)
        await world.pass_s(10)
        ordered = world.service.core.request(an_offering(), world.clock.monotonic_s())
        await world.pass_s(5)
        known = {one.name for one in world.service.core.table}
        await world.clock.leap(3600.0)
        assert agent.fence_.expire(world.clock.monotonic_s()) == (granted.lease.slot,)
        await world.pass_s(5)
        assert [one.lease for one in world.lost] == [granted.lease]
        assert {one.name for one in world.service.core.table} >= known
        assert not any("makes no progress" in one for one in world.service.care.alerts)
        await world.pass_s(120)
        assert world.service.core.table.named(ordered).state is MachineState.READY
        machine = world.service.core.table.named(granted.machine)
        assert machine.state is MachineState.READY
        assert not machine.is_kept_out
        assert not machine.is_silent


async def test_a_machine_that_was_kept_out_for_its_silence_is_let_in_after_one_look() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        world.agents[granted.machine].is_cut_off = True
        await world.pass_s(150)
        machine = world.service.core.table.named(granted.machine)
        await world.clock.leap(3600.0)
        world.agents[granted.machine].is_cut_off = False
        await world.pass_s(400)
        assert machine.state is MachineState.READY
        assert not machine.is_kept_out
