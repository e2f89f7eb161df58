"""The pool at work."""

from dataclasses import replace

import pytest

from nagara.contract.machine import (
    CheckKind,
    DeviceEvent,
    Offering,
    Outcome,
    ProviderError,
)
from nagara.pool.actions import NoSlot
from nagara.pool.demandclass import ANY, DemandClass
from nagara.pool.errors import IllegalEventError, UnknownMachineError
from nagara.pool.figures import machine_metrics, metrics
from nagara.pool.providers.simulated import SimulatedProvider, Trait, a_market
from nagara.pool.states import MachineState
from nagara.testing.clock import JumpingClock
from nagara.testing.pools import MemoryRecord, an_offering

from .service_world import APP, FakeAgent, a_world, begun, claimed, filled


async def test_the_pool_fills_itself_and_then_claims_are_served_at_once() -> None:
    record = MemoryRecord()
    async with a_world(record=record) as world:
        await filled(world)
        granted = await claimed(world)
        await begun(world, granted)
        assert [row.app for row in (await record.read()).leases] == ["app"]
        document = world.service.plan_document()
        assert document["words"]
        assert document["launches"] or document["demands"]


async def test_leases_are_renewed_while_the_machine_answers_and_end_when_it_is_cut_off() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        agent = await begun(world, granted)
        await world.pass_s(60)
        assert agent.fence_.expire(world.clock.monotonic_s()) == ()
        agent.is_cut_off = True
        await world.service.fence(granted.lease)
        machine = world.service.core.table.named(granted.machine)
        assert granted.lease.slot in machine.held
        await world.pass_s(20)
        assert agent.fence_.expire(world.clock.monotonic_s()) == (granted.lease.slot,)
        assert granted.lease.slot not in machine.held


async def test_an_end_that_its_machine_confirms_frees_the_slot_at_once() -> None:
    async with a_world() as world:
        await filled(world)
        level = world.service.figures().level
        granted = await claimed(world)
        assert world.service.figures().level == level - 1
        await world.service.fence(granted.lease)
        assert world.service.figures().level == level
        assert not world.agents[granted.machine].fence_.admits(granted.lease.slot, 1)


async def test_a_machine_that_vanishes_is_replaced_and_its_leases_are_reported() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        world.market.release(granted.machine)
        world.agents[granted.machine].is_cut_off = True
        await world.pass_s(420)
        assert [one.lease for one in world.lost] == [granted.lease]
        assert granted.machine not in world.service.core.table
        assert world.service.figures().level >= 3


async def test_a_bad_machine_never_gets_a_lease() -> None:
    async with a_world() as world:
        assert isinstance(world.service.claim(APP, ANY), NoSlot)
        bad, seen = "", set()
        for _ in range(120):
            await world.pass_s(5)
            for machine in world.service.core.table:
                if not bad:  # ordered, not yet checked
                    bad = machine.name
                    world.agents[bad] = FakeAgent(world.clock, outcome=Outcome.FAIL)
                if machine.name == bad:
                    seen.add(machine.state)
        assert MachineState.READY not in seen
        assert MachineState.RELEASING in seen
        assert bad not in world.service.core.table
        level = world.service.figures().level
        assert level >= 3
        granted = [await claimed(world) for _ in range(level)]
        assert bad not in {one.machine for one in granted}
        assert isinstance(world.service.claim(APP, ANY), NoSlot)


async def test_a_provider_always_out_of_stock_is_asked_ever_more_rarely() -> None:
    async with a_world(trait=Trait(stock=lambda _: 0, is_lying=True)) as world:
        refusal = world.service.claim(APP, ANY)
        await world.pass_s(900)
        assert isinstance(refusal, NoSlot)
        assert 2 <= world.market.refusals <= 6
        assert world.states() == []


async def test_a_persons_orders_are_followed_and_wrong_ones_refused() -> None:
    async with a_world() as world:
        await filled(world)
        name = next(iter(world.service.core.table)).name
        await world.service.drain(name)
        assert world.service.core.table.named(name).state is MachineState.DRAINING
        await world.pass_s(4000)  # it lasts as long as the person wants
        assert world.service.core.table.named(name).state is MachineState.DRAINING
        await world.service.resume(name)
        assert world.service.core.table.named(name).state is MachineState.READY
        with pytest.raises(UnknownMachineError):
            await world.service.drain("nobody")
        with pytest.raises(IllegalEventError):
            await world.service.resume(name)
        await world.service.diagnose(name, CheckKind.HEAVY)
        await world.pass_s(10)
        assert world.service.core.table.named(name).state is MachineState.READY
        assert world.agents[name].asked[-1] is CheckKind.HEAVY


async def test_what_another_process_left_behind_is_taken_over_or_released() -> None:
    clock, record = JumpingClock(), MemoryRecord()
    market = a_market([(an_offering(), Trait(boot_s=60.0))], name="p", seed=1)
    async with a_world(record=record, market=market, clock=clock) as world:
        await filled(world)
        granted = await claimed(world)
        prefix = world.service.core.prefix
        known = {machine.name for machine in world.service.core.table}
    market.launch(f"{prefix}-leaked", "a")
    async with a_world(record=record, market=market, clock=clock) as world:
        assert {machine.name for machine in world.service.core.table} >= known
        assert world.service.core.adopt(granted.lease, "app")
        await world.pass_s(180)
        assert f"{prefix}-leaked" not in market.machines
        assert granted.lease.slot in world.service.core.table.named(granted.machine).held


async def test_what_was_measured_survives_a_restart() -> None:
    clock, record = JumpingClock(), MemoryRecord()
    market = a_market([(an_offering(), Trait(boot_s=60.0))], name="p", seed=1)
    async with a_world(record=record, market=market, clock=clock) as world:
        await filled(world)
        before = world.service
    clock.jump_wall(-7200.0)  # set back meanwhile: nothing becomes younger
    async with a_world(record=record, market=market, clock=clock) as world:
        now_s = clock.monotonic_s()
        core = world.service.core
        assert core.supply.is_proven("a", now_s)
        assert core.leads.refill_s() == before.core.leads.refill_s()
        (old,), (new,) = (list(one.meters.all(now_s)) for one in (before, world.service))
        assert new[0] == old[0]
        assert new[1].rate() == pytest.approx(old[1].rate())
        assert new[1].dispersion == pytest.approx(old[1].dispersion)


async def test_supply_that_was_refused_long_ago_is_tried_again_after_a_restart() -> None:
    clock, record = JumpingClock(), MemoryRecord()
    sold_out = Trait(stock=lambda _: 0, is_lying=True)
    market = a_market([(an_offering(), sold_out)], name="p", seed=1)
    async with a_world(record=record, market=market, clock=clock) as world:
        world.service.claim(APP, ANY)
        await world.pass_s(300)
        assert world.service.core.supply.why_closed("a", clock.monotonic_s())
    async with a_world(record=record, market=market, clock=clock) as world:
        assert world.service.core.supply.why_closed("a", clock.monotonic_s())
    clock.jump_wall(86_400.0)
    async with a_world(record=record, market=market, clock=clock, is_running=False) as world:
        assert world.service.core.supply.why_closed("a", clock.monotonic_s()) is None


OWN = an_offering("local", provider="local", region="local", type="any", price_h=0.0)


async def test_the_own_machine_lends_at_once_and_its_slots_come_back_at_once() -> None:
    record = MemoryRecord()
    async with a_world(own=OWN, least_free=0, record=record) as world:
        granted = await claimed(world)
        assert granted.machine == world.service.core.own
        world.service.give_back(granted.lease)
        again = await claimed(world)
        assert (again.lease.slot, again.lease.epoch) == (granted.lease.slot, 2)
    async with a_world(own=OWN, least_free=0, record=record, is_running=False) as world:
        assert world.service.is_present(again.lease)
        world.service.settle()  # nobody has found a replica that lives under it
        assert not world.service.is_present(again.lease)
        third = await claimed(world)
        assert third.lease.epoch == 3


async def test_the_own_machine_can_be_given_more_and_fewer_slots() -> None:
    record = MemoryRecord()
    async with a_world(own=replace(OWN, devices=3), least_free=0, record=record) as world:
        leases = [(await claimed(world)).lease for _ in range(3)]
    one = replace(OWN, devices=1)
    async with a_world(own=one, least_free=0, record=record, is_running=False) as world:
        assert world.service.adopt(leases[2], "app")
        world.service.settle()
        assert (await claimed(world)).lease.slot == leases[0].slot
        assert isinstance(world.service.claim(APP, DemandClass(regions=("local",))), NoSlot)
        world.service.give_back(leases[2])
        assert isinstance(world.service.claim(APP, DemandClass(regions=("local",))), NoSlot)


async def test_a_machine_of_our_own_is_never_taken_out_by_its_checks() -> None:
    async with a_world(own=OWN, least_free=0) as world:
        own = world.service.core.own
        world.agents[own] = FakeAgent(world.clock, outcome=Outcome.FAIL)
        await world.pass_s(60)
        assert world.service.core.table.named(own).state is MachineState.READY
        assert any("canned" in alert for alert in world.service.care.alerts)
        await world.service.diagnose(own, CheckKind.MEDIUM)
        await world.pass_s(10)
        machine = world.service.core.table.named(own)
        assert machine.state is MachineState.READY
        assert "canned" in machine.reason


async def test_a_machine_that_is_cut_off_loses_its_leases_when_they_are_over_and_not_before() -> (
    None
):
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        agent = await begun(world, granted)
        await world.pass_s(30)
        agent.is_cut_off = True
        await world.pass_s(10)
        assert world.lost == []
        assert world.service.core.table.named(granted.machine).is_silent
        other = await claimed(world)  # new claims go elsewhere meanwhile
        assert other.machine != granted.machine
        await world.pass_s(10)
        assert [one.lease for one in world.lost] == [granted.lease]
        assert agent.fence_.expire(world.clock.monotonic_s()) == (granted.lease.slot,)
        agent.is_cut_off = False
        await world.pass_s(10)
        assert not world.service.core.table.named(granted.machine).is_silent


async def test_a_replica_that_failed_for_its_device_has_its_machine_looked_at() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        world.service.replica_failed(granted.lease, "app", "it wrote: GPU is lost")
        assert MachineState.DRAINING in world.states()
        world.agents[granted.machine].outcome = Outcome.FAIL
        await world.service.fence(granted.lease)
        await world.pass_s(10)
        machine = world.service.core.table.named(granted.machine)
        assert machine.state is MachineState.QUARANTINED
        assert "canned" in machine.reason


async def test_the_figures_are_metrics_too() -> None:
    async with a_world() as world:
        await filled(world)
        await claimed(world)
        figures = world.service.figures()
        assert figures.leased == 1
        assert 0 < figures.idle_cost_h < figures.cost_h
        text = metrics(figures)
        assert "nagara_pool_claims_total 2\n" in text
        assert f"nagara_pool_level {figures.level}\n" in text
        table = world.service.core.table
        text = machine_metrics(table)
        ready = sum(one.state is MachineState.READY for one in table)
        assert f'nagara_pool_machines_by_state{{state="ready"}} {ready}\n' in text
        (leased,) = (one.name for one in table if one.held)
        label = f'{{machine="{leased}",type="{table.named(leased).offering.type}"}}'
        assert f"nagara_machine_leased{label} 1\n" in text
        assert f"nagara_machine_silent{label} 0\n" in text
        assert set(world.service.heard_ago()) == {one.name for one in table}


async def test_an_unknown_error_of_one_provider_does_not_end_the_search() -> None:
    class Broken(SimulatedProvider):
        async def launch(self, name: str, offering: Offering) -> None:
            raise ProviderError("something nobody has seen before")

    async with a_world() as world:
        cheap = a_market([(an_offering("b", provider="q", price_h=0.1), Trait())], name="q")
        world.service.add_provider(Broken(cheap, world.clock))
        await filled(world)
        assert {one.offering.id for one in world.service.core.table
                if one.state is MachineState.READY} == {"a"}  # fmt: skip


async def test_a_jump_of_the_wall_clock_changes_nothing() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        ready = {one.name for one in world.service.core.table if one.clock is not None}
        for seconds in (3600.0, -7200.0, 1e8):
            world.clock.jump_wall(seconds)
            await world.pass_s(10)
        assert ready <= {
            one.name for one in world.service.core.table if one.state is MachineState.READY
        }
        assert world.service.core.grants.held(granted.lease)


async def test_a_device_that_falls_off_the_bus_takes_its_machine_out() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        world.agents[granted.machine].events = [DeviceEvent(79, "0000:3b:00", "")]
        await world.pass_s(35)
        machine = world.service.core.table.named(granted.machine)
        assert machine.state is MachineState.DRAINING
        await world.service.fence(granted.lease)
        assert machine.state is MachineState.QUARANTINED


async def test_an_event_whose_message_was_lost_still_has_its_consequence() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        machine = world.service.core.table.named(granted.machine)
        agent = world.agents[granted.machine]
        agent.events.append(DeviceEvent(13, "0000:3b:00", ""))
        await world.pass_s(35)
        agent.is_answer_lost = True
        agent.events.append(DeviceEvent(79, "0000:3b:00", ""))
        await world.pass_s(35)
        assert machine.state is MachineState.READY
        agent.is_answer_lost = False
        await world.pass_s(35)
        assert machine.state is MachineState.DRAINING


async def test_a_machine_that_does_not_say_how_it_is_gets_no_new_leases() -> None:
    async with a_world() as world:
        await filled(world)
        granted = await claimed(world)
        world.agents[granted.machine].is_cut_off = True
        await world.pass_s(150)
        assert world.service.core.table.named(granted.machine).is_kept_out
        world.agents[granted.machine].is_cut_off = False
        await world.pass_s(70)
        assert not world.service.core.table.named(granted.machine).is_kept_out
