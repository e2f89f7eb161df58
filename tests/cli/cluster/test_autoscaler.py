"""Ray's own autoscaler, both of its makes: what the pool waits for comes, and goes again."""

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nagara.cli.cluster.engine import RayEngine, RaySettings
from nagara.contract.cluster import MachineKind
from nagara.contract.machine import Offering, Presence, ProviderMachine
from nagara.node.network.client import AgentNetwork
from nagara.node.network.cluster_token import ClusterToken
from nagara.node.network.membership import Membership
from nagara.node.remote_node import RemoteNode
from nagara.pool.providers.ray import AddedKind, RayProvider, RayTerms

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(
        not os.environ.get("NAGARA_CLUSTER"), reason="make test-cluster runs it: it takes minutes"
    ),
]

TOKEN = ClusterToken("t" * 64)
SMALL, HUGE = MachineKind("cpu", 0, 2.0), MachineKind("cpu", 0, 64.0)
H100 = MachineKind("h100", 2, 2.0)


@pytest_asyncio.fixture(params=[False, True], ids=["v1", "v2"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RayEngine]:
    from ray_cloud import scaled_cluster  # needs Ray

    cluster = await asyncio.to_thread(scaled_cluster, tmp_path, 2, is_v2=request.param)
    engine = RayEngine(RaySettings(cluster.address, TOKEN.value))
    try:
        yield engine
        await engine.close()
    finally:
        await asyncio.to_thread(cluster.end)


def provider(engine: RayEngine, *kinds: MachineKind) -> RayProvider:
    return RayProvider("ray", engine, RayTerms(adds=tuple(AddedKind(kind, 3) for kind in kinds)))


async def until(ray: RayProvider, name: str, presence: Presence) -> ProviderMachine:
    """The machine, once that is said of it; the list is asked for as the pool does."""
    listed: dict[str, ProviderMachine] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(180):
            while name not in listed or listed[name].presence is not presence:
                await asyncio.sleep(0.5)
                listed = {one.name: one for one in await ray.machines()}
            return listed[name]
    raise AssertionError(f"{name} is never {presence}: {listed}")


async def until_gone(engine: RayEngine) -> None:
    """Returns when no machine but the head is in the cluster."""
    async with asyncio.timeout(180):
        while await engine.machines():
            await asyncio.sleep(0.5)


async def offered(ray: RayProvider, name: str) -> Offering:
    return next(one for one in await ray.offerings() if one.id == f"ray/{name}")


async def test_machines_are_added_one_beside_the_other_and_removed_when_given_back(
    engine: RayEngine,
) -> None:
    ray = provider(engine, SMALL)
    offering = await offered(ray, "cpu-2c")
    await ray.launch("pool-1", offering)
    first = await until(ray, "pool-1", Presence.RUNNING)
    # One like it is in use already: that one is not what is asked for now.
    await ray.launch("pool-2", offering)
    second = await until(ray, "pool-2", Presence.RUNNING)
    assert first.address != second.address
    async with AgentNetwork(Membership(TOKEN)) as network:
        for machine in (first, second):
            assert await RemoteNode(network.transport(machine.address)).replicas() == ()
    await ray.launch("pool-3", offering)
    refused = await until(ray, "pool-3", Presence.REFUSED)
    assert "its max_workers are there" in refused.problem
    for name in ("pool-1", "pool-2", "pool-3"):
        await ray.release(name)
    assert await ray.machines() == ()
    await until_gone(engine)


async def test_what_no_node_type_has_keeps_nothing_else_from_coming(engine: RayEngine) -> None:
    ray = provider(engine, H100, HUGE)
    await ray.launch("pool-1", await offered(ray, "h100x2-2c"))
    await ray.launch("pool-2", await offered(ray, "cpu-64c"))
    await until(ray, "pool-1", Presence.RUNNING)
    refused = await until(ray, "pool-2", Presence.REFUSED)
    assert "none of its node types has as much" in refused.problem
    await ray.release("pool-2")
    await ray.release("pool-1")
    await until_gone(engine)


async def test_an_end_takes_back_what_was_asked_for(engine: RayEngine) -> None:
    ray = provider(engine, SMALL)
    await ray.launch("pool-1", await offered(ray, "cpu-2c"))
    await engine.close()  # a machine may have been launched meanwhile; it goes again
    await until_gone(engine)
    await asyncio.sleep(5.0)  # five decisions of the autoscaler
    assert await engine.machines() == ()
