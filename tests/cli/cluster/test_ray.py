"""A real Ray, and what nagara does with it: machines that are lent, and agents that outlive it."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from ray_cluster import RayCluster

from nagara.base.errors import UsageError
from nagara.cli.cluster import engine as engine_module
from nagara.cli.cluster.engine import RayEngine, RaySettings, require_ray
from nagara.contract.cluster import EngineMachine
from nagara.contract.machine import NoCapacityError, ProviderError
from nagara.node.network.client import AgentNetwork
from nagara.node.network.cluster_token import ClusterToken
from nagara.node.network.membership import Membership
from nagara.node.remote_node import RemoteNode
from nagara.pool.providers.ray import RayProvider
from nagara.testing.node_conformance import NodeConformance
from nagara.testing.provider_conformance import ProviderConformance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

TOKEN = ClusterToken("t" * 64)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("ray"))
    try:
        cluster.join("m1")
        yield cluster
    finally:
        cluster.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def joined(ray: RayCluster) -> AsyncIterator[RayEngine]:
    engine = RayEngine(RaySettings(ray.address, TOKEN.value))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(joined: RayEngine) -> AsyncIterator[RayEngine]:
    """One connection for all tests: each begins without a lent machine."""
    yield joined
    for machine in await joined.machines():
        if machine.lent_as:
            await joined.take_back(machine.id)


async def until(
    engine: RayEngine, condition: Callable[[EngineMachine], object], what: str
) -> EngineMachine:
    """The only machine, once that holds."""
    machines: tuple[EngineMachine, ...] = ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(240):
            while True:
                machines = await engine.machines()
                if len(machines) == 1 and condition(machines[0]):
                    return machines[0]
                await asyncio.sleep(0.1)
    raise AssertionError(f"{what}: {machines}")


async def lent(engine: RayEngine, name: str = "pool-1") -> EngineMachine:
    machine = await until(engine, lambda one: not one.problem and not one.lent_as, "no machine")
    await engine.lend(machine.id, name)
    return await until(engine, lambda one: one.address, "no agent")


class TestProviderOfRay(ProviderConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def provider(self, engine: RayEngine) -> RayProvider:
        await until(engine, lambda one: not one.problem and not one.lent_as, "no machine")
        return RayProvider("ray", engine)


class TestNodeOfRaysMachine(NodeConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def node(self, engine: RayEngine) -> AsyncIterator[RemoteNode]:
        machine = await lent(engine)
        async with AgentNetwork(Membership(TOKEN)) as network:
            node = RemoteNode(network.transport(machine.address))
            yield node
            for status in await node.replicas():
                await node.stop(status.replica, grace_s=0)


async def test_machines_are_told_as_they_are_but_not_the_own_one(engine: RayEngine) -> None:
    machine = await until(engine, lambda one: not one.problem, "no machine")
    assert (machine.type, machine.devices, machine.cpu) == ("cpu", 0, 2.0)
    assert machine.memory_bytes > 1 << 30
    assert machine.disk_bytes > 0
    (offering,) = await RayProvider("ray", engine).offerings()
    assert (offering.type, offering.devices, offering.stock) == ("cpu", 2, 1)


async def test_a_machine_that_another_job_uses_is_not_lent(
    ray: RayCluster, engine: RayEngine
) -> None:
    machine = await until(engine, lambda one: not one.problem and not one.lent_as, "no machine")
    code = (
        "import ray, sys\n"
        "ray.init(address=sys.argv[1], namespace='other', log_to_driver=False)\n"
        "from ray.util.placement_group import placement_group\n"
        "held = placement_group([{'CPU': 2}])\n"
        "assert held.wait(60)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    other = await asyncio.create_subprocess_exec(
        *(engine_module.sys.executable, "-c", code, ray.address), stdin=-1, stdout=-1
    )
    try:
        assert other.stdout is not None
        assert await other.stdout.readline() == b"held\n"
        with pytest.raises(NoCapacityError, match="another of Ray's jobs"):
            await engine.lend(machine.id, "pool-1")
    finally:
        await other.communicate(b"")
    assert (await lent(engine)).lent_as == "pool-1"
    with pytest.raises(NoCapacityError, match="another name"):
        await engine.lend(machine.id, "pool-2")
    with pytest.raises(NoCapacityError, match="is gone"):
        await engine.lend("0" * 56, "pool-3")


async def test_agent_and_replicas_outlive_the_actor_and_the_bridge(
    ray: RayCluster, engine: RayEngine
) -> None:
    machine = await lent(engine)
    conformance = NodeConformance()
    async with AgentNetwork(Membership(TOKEN)) as network:
        node = RemoteNode(network.transport(machine.address))
        await node.start(conformance.order("steady-1"))
        ray.kill("ray::MachineActor")
        assert (await node.replicas())[0].replica == "steady-1"
        (await node.dial("steady-1")).close()
        assert engine._bridge is not None
        engine._bridge._process.kill()
        await engine._bridge._process.wait()
        with pytest.raises(ProviderError, match="does not answer"):
            await engine.machines()
        back = await until(engine, lambda one: one.address and not one.problem, "no actor")
        assert (back.lent_as, back.address) == ("pool-1", machine.address)
        await node.stop("steady-1", grace_s=0)


async def test_a_cluster_that_is_not_there_is_an_unknown_outcome_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "CONNECT_S", 5.0)
    absent = RayEngine(RaySettings("127.0.0.1:1", TOKEN.value))
    try:
        with pytest.raises(ProviderError, match=r"Ray (cannot be reached|does not answer)"):
            await absent.machines()
    finally:
        await absent.close()


async def test_without_ray_the_package_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="not installed") as caught:
        require_ray()
    assert "pip install 'nagara[cluster]'" in str(caught.value)


async def test_a_killed_head_ends_neither_agent_nor_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await asyncio.to_thread(RayCluster, tmp_path)
    try:
        await asyncio.to_thread(cluster.join, "m1")
        await _with_a_dead_head(cluster, monkeypatch)
    finally:
        cluster.end()


async def _with_a_dead_head(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RayEngine(RaySettings(cluster.address, TOKEN.value))
    machine = await lent(engine)
    async with AgentNetwork(Membership(TOKEN)) as network:
        node = RemoteNode(network.transport(machine.address))
        await node.start(NodeConformance().order("steady-1"))
        monkeypatch.setattr(engine_module, "ANSWER_S", 5.0)  # the driver itself waits for a minute
        cluster.kill("gcs_server")
        cluster.kill("raylet")
        (await node.dial("steady-1")).close()
        with pytest.raises(ProviderError, match="Ray"):
            await engine.machines()
        (await node.dial("steady-1")).close()
        await node.stop("steady-1", grace_s=0)
    await engine.close()
