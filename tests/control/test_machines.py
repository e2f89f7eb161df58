"""Several machines as one node, over fake ones."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from nagara.contract.machine import (
    MachineUnreachableError,
    Offering,
    Presence,
    ProviderMachine,
    Renewal,
    RenewalAnswer,
)
from nagara.contract.node import NodeUnavailableError, ReplicaGoneError
from nagara.contract.replica import Canary, Lease, ReplicaSpec, StartOrder
from nagara.control.machines import Machines
from nagara.pool.actions import Check, Granted, Launch
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.lease import SKEW_S, TTL_S
from nagara.pool.service import PoolService
from nagara.pool.setup import PoolSetup
from nagara.testing.clock import JumpingClock
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import HealthyAgent, MemoryRecord, a_machine, an_offering

ELSEWHERE = DemandClass(regions=("eu-*",))


class Agent(HealthyAgent):
    """A healthy one with a clock of its own that can be cut off."""

    def __init__(self, clock: JumpingClock) -> None:
        self.clock = clock
        self.is_cut_off = False
        self.fenced: list[tuple[str, int]] = []

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        if self.is_cut_off:
            raise MachineUnreachableError("cut off")
        return RenewalAnswer(self.clock.monotonic_s() + 5000.0)

    async def fence(self, slot: str, epoch: int) -> None:
        self.fenced.append((slot, epoch))


@dataclass
class Place:
    """A pool of the own machine and one other, and their nodes."""

    clock: JumpingClock
    pool: PoolService
    own: FakeNode
    other: FakeNode
    agent: Agent
    machines: Machines

    def order(self, name: str, wanted: DemandClass) -> StartOrder:
        granted = self.pool.claim(Claimant("app"), wanted)
        assert isinstance(granted, Granted)
        spec = ReplicaSpec(
            tenant="default", app="app", definition="d", image="host", command=("x",), port=80,
            ready_path="/", canary=Canary("/"),
        )  # fmt: skip
        return StartOrder(name, granted.lease, spec)

    def cut_off(self) -> None:
        self.agent.is_cut_off = True
        self.other.is_reachable = False


def add_ready_machine(pool: PoolService, offering: Offering) -> None:
    core = pool.core
    name = core.request(offering, 0.0)
    (launch,) = (one for one in core.take_actions() if isinstance(one, Launch))
    core.accepted(launch, 0.0)
    seen = [ProviderMachine(name, offering.id, Presence.RUNNING, "there")]
    core.listed("p", seen, {offering.id: offering}, 0.0, 0.0)
    (check,) = (one for one in core.take_actions() if isinstance(one, Check))
    core.checked(check, 0.0, None)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    clock, record = JumpingClock(), MemoryRecord()
    own, other, agent = FakeNode(clock), FakeNode(clock), Agent(clock)
    base = a_machine(1)
    setup = PoolSetup(base.own, lambda name, address: agent if address else HealthyAgent())
    pool = PoolService(await record.read(), record, setup, clock, lambda pool: f"{pool}-1")
    add_ready_machine(pool, an_offering(devices=1))
    machines = Machines(own, pool, lambda address: other)
    yield Place(clock, pool, own, other, agent, machines)
    await own.close()
    await other.close()


async def test_a_replica_is_started_where_its_lease_is(place: Place) -> None:
    await place.machines.start(place.order("here", DemandClass(regions=("local",))))
    await place.machines.start(place.order("there", ELSEWHERE))
    assert list(place.own.live) == ["here"]
    assert list(place.other.live) == ["there"]
    assert {one.replica for one in await place.machines.replicas()} == {"here", "there"}
    (await place.machines.dial("there")).close()
    assert b"" in await place.machines.logs("there")
    for name in ("here", "there"):
        await place.machines.stop(name)
    assert not place.own.live
    assert not place.other.live
    with pytest.raises(ReplicaGoneError):
        await place.machines.dial("there")


async def test_a_start_elsewhere_carries_the_end_of_its_lease_on_that_machines_clock(
    place: Place,
) -> None:
    await place.machines.start(place.order("here", DemandClass(regions=("local",))))
    await place.machines.start(place.order("there", ELSEWHERE))
    assert place.own.live["here"].order.lease.expires_at_s is None
    end_s = place.other.live["there"].order.lease.expires_at_s
    assert end_s == place.clock.monotonic_s() + 5000.0 + TTL_S


async def test_a_machine_that_cannot_be_asked_starts_nothing_and_gets_no_more_claims(
    place: Place,
) -> None:
    place.cut_off()
    with pytest.raises(NodeUnavailableError):
        await place.machines.start(place.order("there", ELSEWHERE))
    assert not place.other.started
    assert not isinstance(place.pool.claim(Claimant("app"), ELSEWHERE), Granted)


async def test_a_replica_that_cannot_be_asked_to_end_is_gone_when_its_lease_is_over(
    place: Place,
) -> None:
    order = place.order("there", ELSEWHERE)
    await place.machines.start(order)
    place.cut_off()
    with pytest.raises(NodeUnavailableError):
        await place.machines.stop("there")
    await place.clock.advance(TTL_S)
    await place.pool.tick()
    with pytest.raises(NodeUnavailableError):
        await place.machines.stop("there")
    await place.clock.advance(SKEW_S)
    await place.pool.tick()
    await place.machines.stop("there")
    assert not place.pool.is_present(order.lease)


@pytest.mark.parametrize("was_asked", [True, False])
async def test_replicas_of_a_silent_machine_are_told_as_last_seen_while_their_lease_runs(
    place: Place, was_asked: bool
) -> None:
    order = place.order("there", ELSEWHERE)
    await place.machines.start(order)
    if was_asked:
        await place.machines.replicas()
    place.cut_off()
    assert [one.replica for one in await place.machines.replicas()] == ["there"]
    place.pool.abandon(order.lease)
    await place.clock.advance(TTL_S + SKEW_S)
    await place.pool.tick()
    assert await place.machines.replicas() == ()


async def test_what_is_left_of_a_replica_whose_lease_is_over_goes_when_its_machine_is_back(
    place: Place,
) -> None:
    order = place.order("there", ELSEWHERE)
    await place.machines.start(order)
    place.cut_off()
    place.pool.abandon(order.lease)
    await place.clock.advance(TTL_S + SKEW_S)
    await place.pool.tick()
    await place.machines.stop("there")  # it cannot be asked, and need not be
    place.other.is_reachable = True
    assert [one.replica for one in await place.machines.replicas()] == ["there"]
    await place.machines.stop("there")
    assert not place.other.live


async def test_exits_of_all_machines_are_heard(place: Place) -> None:
    await place.machines.start(place.order("here", DemandClass(regions=("local",))))
    await place.machines.start(place.order("there", ELSEWHERE))
    heard: list[Any] = []

    async def listen() -> None:
        heard.extend([status.replica async for status in _two(place.machines.exits())])

    listening = asyncio.create_task(listen())
    while not (place.own._listeners and place.other._listeners):
        await asyncio.sleep(0.01)
    await place.other.exit_replica("there")
    await place.own.exit_replica("here")
    await listening
    assert sorted(heard) == ["here", "there"]


async def _two(exits: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for _ in range(2):
        yield await anext(exits)
    await exits.aclose()  # type: ignore[attr-defined]


async def test_after_a_restart_replicas_are_found_where_they_are(place: Place) -> None:
    await place.machines.start(place.order("there", ELSEWHERE))
    anew = Machines(place.own, place.pool, lambda address: place.other)
    (status,) = await anew.replicas()
    assert isinstance(status.lease, Lease)
    assert place.pool.adopt(status.lease, "app")
    await anew.stop("there")
    assert not place.other.live
