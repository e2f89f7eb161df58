"""The pool at work, with a simulated provider, machines that answer, and a clock that jumps."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    DeviceEvent,
    HealthReport,
    MachineUnreachableError,
    Offering,
    Outcome,
    ProviderError,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.pool.actions import Granted, Lost, NoSlot
from nagara.pool.demandclass import ANY
from nagara.pool.fairness import Claimant
from nagara.pool.figures import metrics
from nagara.pool.ledger import SqliteLedger
from nagara.pool.planner import make_plan
from nagara.pool.problem import Plan, Problem
from nagara.pool.providers.simulated import SimulatedMarket, SimulatedProvider, Trait, a_market
from nagara.pool.service import PoolService
from nagara.pool.sizing import Policy
from nagara.pool.solver import solve
from nagara.pool.states import MachineState
from nagara.sandbox.fence import Fence
from nagara.testing.clock import JumpingClock
from nagara.testing.pools import an_offering

APP = Claimant("app")


class InProcessRunner:
    """Plans at once, without a child process."""

    async def plan(self, problem: Problem) -> Plan:
        return make_plan(problem, solve)


@dataclass
class FakeAgent:
    """A machine's agent with a real fence."""

    clock: JumpingClock
    fence_: Fence = field(default_factory=Fence)
    is_cut_off: bool = False
    outcome: Outcome = Outcome.PASS
    ended: list[str] = field(default_factory=list)
    events: list[DeviceEvent] = field(default_factory=list)
    rounds: int = 0
    is_answer_lost: bool = False

    def _reached(self) -> None:
        if self.is_cut_off:
            raise MachineUnreachableError("cut off")

    async def check(self, kind: CheckKind) -> HealthReport:
        self._reached()
        return HealthReport(kind, (CheckResult("disk", self.outcome, "canned"),))

    async def vitals(self, heard: str) -> Vitals:
        self._reached()
        self.rounds += 1
        if self.is_answer_lost:
            raise MachineUnreachableError("its answer was lost")
        new = self.events[int(heard or 0) :]
        return Vitals(self.rounds, tuple(new), (), str(len(self.events)))

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        self._reached()
        now_s = self.clock.monotonic_s()
        return RenewalAnswer(now_s, self.fence_.renew(renewals, now_s))

    async def fence(self, slot: str, epoch: int) -> None:
        self._reached()
        self.ended += self.fence_.raise_to(slot, epoch)


@dataclass
class World:
    """Everything around one service."""

    clock: JumpingClock
    market: SimulatedMarket
    service: PoolService
    agents: dict[str, FakeAgent]
    lost: list[Lost]

    def states(self) -> list[MachineState]:
        return [machine.state for machine in self.service.core.table]

    async def pass_s(self, seconds: float) -> None:
        """In steps, so that threads and tasks keep up."""
        for _ in range(int(seconds / 5)):
            await self.clock.advance(5.0)
            for _ in range(3):  # what waits for the record's thread goes on in this step
                await self.service._on_thread(int)
                for _ in range(5):
                    await asyncio.sleep(0)


@asynccontextmanager
async def a_world(
    folder: Path, *, least_free: int = 3, trait: Trait | None = None,
    market: SimulatedMarket | None = None, clock: JumpingClock | None = None,
) -> AsyncIterator[World]:  # fmt: skip
    clock = clock or JumpingClock()
    market = market or a_market([(an_offering(), trait or Trait(boot_s=60.0))], name="p", seed=1)
    agents: dict[str, FakeAgent] = {}
    lost: list[Lost] = []
    numbers = itertools.count()
    ledger = SqliteLedger(folder / "pool.db")
    service = PoolService(
        ledger,
        (SimulatedProvider(market, clock),),
        lambda name, _: agents.setdefault(name, FakeAgent(clock)),
        Policy(least_free=least_free, spare_machines=0),
        clock,
        lambda pool: f"{pool}-{next(numbers)}-{id(clock)}-{id(agents)}",
        required=lambda _: frozenset({"disk"}),
        on_lost=lost.append,
        runner=InProcessRunner(),  # type: ignore[arg-type]
    )
    task = asyncio.create_task(service.run())
    await asyncio.sleep(0.01)
    try:
        yield World(clock, market, service, agents, lost)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ledger.close()


async def claimed(world: World) -> Granted:
    granted = world.service.claim(APP, ANY)
    assert isinstance(granted, Granted), granted
    await world.service.durable()
    return granted


async def filled(world: World) -> None:
    """A class must have been claimed once before there is a reserve for it."""
    assert isinstance(world.service.claim(APP, ANY), NoSlot)
    await world.pass_s(420)
    assert world.service.figures().level >= 3


async def test_the_pool_fills_itself_and_then_claims_are_served_at_once(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        terms = await world.service.terms(granted.lease)
        assert terms is not None
        agent = world.agents[granted.machine]
        assert agent.fence_.begin(terms, world.clock.monotonic_s()) == ()
        reader = SqliteLedger(tmp_path / "pool.db", readonly=True)
        assert [row.app for row in reader.read().leases] == ["app"]
        assert reader.fact("plan")["words"]
        reader.close()


async def test_leases_are_renewed_while_the_machine_answers_and_end_when_it_is_cut_off(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        terms = await world.service.terms(granted.lease)
        assert terms is not None
        agent = world.agents[granted.machine]
        agent.fence_.begin(terms, world.clock.monotonic_s())
        await world.pass_s(60)
        assert agent.fence_.expire(world.clock.monotonic_s()) == ()
        agent.is_cut_off = True
        await world.service.give_back(granted.lease)
        machine = world.service.core.table.named(granted.machine)
        assert granted.lease.slot in machine.held
        await world.pass_s(20)
        assert agent.fence_.expire(world.clock.monotonic_s()) == (granted.lease.slot,)
        assert granted.lease.slot not in machine.held


async def test_an_end_that_its_machine_confirms_frees_the_slot_at_once(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        level = world.service.figures().level
        granted = await claimed(world)
        assert world.service.figures().level == level - 1
        await world.service.give_back(granted.lease)
        assert world.service.figures().level == level
        assert not world.agents[granted.machine].fence_.admits(granted.lease.slot, 1)


async def test_a_machine_that_vanishes_is_replaced_and_its_leases_are_reported(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        world.market.release(granted.machine)
        world.agents[granted.machine].is_cut_off = True
        await world.pass_s(420)
        assert [one.lease for one in world.lost] == [granted.lease]
        assert granted.machine not in world.service.core.table
        assert world.service.figures().level >= 3


async def test_a_bad_machine_never_gets_a_lease(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        assert isinstance(world.service.claim(APP, ANY), NoSlot)
        bad: set[str] = set()
        for _ in range(24):
            await world.pass_s(10)
            for name, agent in world.agents.items():
                if not bad:
                    bad.add(name)
                agent.outcome = Outcome.FAIL if name in bad else Outcome.PASS
        await world.pass_s(600)
        ready = {one.name for one in world.service.core.table}
        assert world.service.figures().level >= 3
        first_checked = next(iter(bad))
        machine = world.service.core.table.get(first_checked)
        assert machine is None or machine.state is not MachineState.CHECKING or ready


async def test_a_provider_always_out_of_stock_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    async with a_world(tmp_path, trait=Trait(stock=lambda _: 0, is_lying=True)) as world:
        refusal = world.service.claim(APP, ANY)
        await world.pass_s(900)
        assert isinstance(refusal, NoSlot)
        assert 2 <= world.market.refusals <= 6
        assert world.states() == []


async def test_a_persons_order_in_the_record_is_followed(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        name = next(iter(world.service.core.table)).name
        other = SqliteLedger(tmp_path / "pool.db")
        other.add_order(name, "drain")
        await world.pass_s(10)
        assert world.service.core.table.named(name).state is MachineState.DRAINING
        other.add_order(name, "resume")
        other.add_order("nobody", "drain")
        await world.pass_s(10)
        assert world.service.core.table.named(name).state is MachineState.READY
        assert other.orders() == ()
        other.close()


async def test_what_another_process_left_behind_is_taken_over_or_released(tmp_path: Path) -> None:
    clock = JumpingClock()
    market = a_market([(an_offering(), Trait(boot_s=60.0))], name="p", seed=1)
    async with a_world(tmp_path, market=market, clock=clock) as world:
        await filled(world)
        granted = await claimed(world)
        prefix = world.service.core.prefix
        known = {machine.name for machine in world.service.core.table}
    market.launch(f"{prefix}-leaked", "a")
    async with a_world(tmp_path, market=market, clock=clock) as world:
        assert {machine.name for machine in world.service.core.table} >= known
        assert world.service.core.adopt(granted.lease, "app")
        await world.pass_s(180)
        assert f"{prefix}-leaked" not in market.machines
        assert granted.lease.slot in world.service.core.table.named(granted.machine).held


async def test_a_replica_that_failed_for_its_device_has_its_machine_looked_at(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        world.service.replica_failed(granted.machine, "illegal memory access")
        assert MachineState.DRAINING in world.states()
        world.agents[granted.machine].outcome = Outcome.FAIL
        await world.service.give_back(granted.lease)
        await world.pass_s(10)
        machine = world.service.core.table.named(granted.machine)
        assert machine.state is MachineState.QUARANTINED
        assert "canned" in machine.reason


async def test_the_figures_are_metrics_too(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        await claimed(world)
        figures = world.service.figures()
        assert figures.leased == 1
        assert 0 < figures.idle_cost_h < figures.cost_h
        text = metrics(figures)
        assert "nagara_pool_claims_total 2\n" in text
        assert f"nagara_pool_level {figures.level}\n" in text


async def test_an_unknown_error_of_one_provider_does_not_end_the_search(tmp_path: Path) -> None:
    class Broken(SimulatedProvider):
        async def launch(self, name: str, offering: Offering) -> None:
            raise ProviderError("something nobody has seen before")

    async with a_world(tmp_path) as world:
        cheap = a_market([(an_offering("b", provider="q", price_h=0.1), Trait())], name="q")
        world.service.add_provider(Broken(cheap, world.clock))
        await filled(world)
        assert {one.offering.id for one in world.service.core.table
                if one.state is MachineState.READY} == {"a"}  # fmt: skip


async def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
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


async def test_a_device_that_falls_off_the_bus_takes_its_machine_out(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        world.agents[granted.machine].events = [DeviceEvent(79, "0000:3b:00", "")]
        await world.pass_s(35)
        machine = world.service.core.table.named(granted.machine)
        assert machine.state is MachineState.DRAINING
        await world.service.give_back(granted.lease)
        assert machine.state is MachineState.QUARANTINED


async def test_an_event_whose_message_was_lost_still_has_its_consequence(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
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


async def test_a_machine_that_does_not_say_how_it_is_gets_no_new_leases(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        await filled(world)
        granted = await claimed(world)
        world.agents[granted.machine].is_cut_off = True
        await world.pass_s(150)
        assert world.service.core.table.named(granted.machine).is_kept_out
        world.agents[granted.machine].is_cut_off = False
        await world.pass_s(70)
        assert not world.service.core.table.named(granted.machine).is_kept_out
