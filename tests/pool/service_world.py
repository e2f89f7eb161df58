"""A pool's service with a simulated provider, machines that answer, and a clock that jumps."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    DeviceEvent,
    HealthReport,
    MachineUnreachableError,
    Offering,
    Outcome,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.pool.actions import Granted, Lost, NoSlot
from nagara.pool.demandclass import ANY
from nagara.pool.fairness import Claimant
from nagara.pool.planner import make_plan
from nagara.pool.problem import Plan, Problem
from nagara.pool.providers.simulated import SimulatedMarket, SimulatedProvider, Trait, a_market
from nagara.pool.service import PoolService
from nagara.pool.setup import PoolSetup
from nagara.pool.sizing import Policy
from nagara.pool.solver import solve
from nagara.pool.states import MachineState
from nagara.sandbox.fence import Fence
from nagara.testing.clock import JumpingClock
from nagara.testing.pools import MemoryRecord, an_offering

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
    is_hung: bool = False
    outcome: Outcome = Outcome.PASS
    ended: list[str] = field(default_factory=list)
    events: list[DeviceEvent] = field(default_factory=list)
    rounds: int = 0
    is_answer_lost: bool = False
    asked: list[CheckKind] = field(default_factory=list)

    async def _reached(self) -> None:
        if self.is_hung:
            await asyncio.Event().wait()
        if self.is_cut_off:
            raise MachineUnreachableError("cut off")

    async def check(self, kind: CheckKind) -> HealthReport:
        await self._reached()
        self.asked.append(kind)
        return HealthReport(kind, (CheckResult("disk", self.outcome, "canned"),))

    async def vitals(self, heard: str) -> Vitals:
        await self._reached()
        self.rounds += 1
        if self.is_answer_lost:
            raise MachineUnreachableError("its answer was lost")
        new = self.events[int(heard or 0) :]
        return Vitals(self.rounds, tuple(new), (), str(len(self.events)))

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        await self._reached()
        now_s = self.clock.monotonic_s()
        return RenewalAnswer(now_s, self.fence_.renew(renewals, now_s))

    async def fence(self, slot: str, epoch: int) -> None:
        await self._reached()
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
            for _ in range(15):  # what waits for the record goes on in this step
                await asyncio.sleep(0)


@asynccontextmanager
async def a_world(
    *, least_free: int = 3, trait: Trait | None = None, record: MemoryRecord | None = None,
    market: SimulatedMarket | None = None, clock: JumpingClock | None = None,
    own: Offering | None = None, is_running: bool = True,
) -> AsyncIterator[World]:  # fmt: skip
    clock = clock or JumpingClock()
    market = market or a_market([(an_offering(), trait or Trait(boot_s=60.0))], name="p", seed=1)
    agents: dict[str, FakeAgent] = {}
    lost: list[Lost] = []
    numbers = itertools.count()
    record = record or MemoryRecord()
    setup = PoolSetup(
        own,
        lambda name, _: agents.setdefault(name, FakeAgent(clock)),
        (SimulatedProvider(market, clock),),
        Policy(least_free=least_free, spare_machines=0),
        lambda _: frozenset({"disk"}),
        InProcessRunner(),
    )
    service = PoolService(
        await record.read(), record, setup, clock,
        lambda pool: f"{pool}-{next(numbers)}-{id(clock)}-{id(agents)}",
    )  # fmt: skip
    service.on_lost = lost.append
    await service.load()
    running = service.run() if is_running else asyncio.Event().wait()
    task: asyncio.Task[object] = asyncio.create_task(running)
    await asyncio.sleep(0.01)
    try:
        yield World(clock, market, service, agents, lost)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await service.close()


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


async def begun(world: World, granted: Granted) -> FakeAgent:
    """A start under the lease has arrived at its machine."""
    end_s = await world.service.terms(granted.lease)
    assert end_s is not None
    agent = world.agents[granted.machine]
    lease = Renewal(granted.lease.slot, granted.lease.epoch, end_s, 0.0)
    assert agent.fence_.begin(lease, world.clock.monotonic_s()) == ()
    return agent
