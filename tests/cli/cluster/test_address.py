"""Addresses of a Ray cluster: what they lead to, and what is said of those that lead nowhere."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from ray_cluster import RayCluster

from nagara.base.errors import UsageError
from nagara.cli.cluster.address import checked_address, head_port
from nagara.cli.cluster.engine import RayEngine, RaySettings
from nagara.contract.cluster import EngineMachine, MachineKind
from nagara.contract.machine import ProviderError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")

# A process whose Ray is another version's asks for the cluster there.
OTHER_VERSION = """
import json, sys
import ray
ray.__version__ = "2.41.0"
from nagara.cli.cluster.bridge import Bridge, _answer
arguments = {"address": sys.argv[1], "leaves_own_out": False, "state": None}
print(json.dumps(_answer(Bridge(), json.dumps({"call": "connect", "arguments": arguments}))))
"""

# A machine on which no Ray runs.
ALONE = """
import asyncio
from nagara.cli.cluster.engine import RayEngine, RaySettings
from nagara.contract.machine import ProviderError
async def look():
    engine = RayEngine(RaySettings("auto", "t"))
    try:
        await engine.machines()
    except ProviderError as error:
        print(error)
    finally:
        await engine.close()
asyncio.run(look())
"""


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "ray://head.example:10001", "[fd00::1]:6379"]
)
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert checked_address(address, "--cluster") == address
    assert head_port(address, "--cluster") is None


@pytest.mark.parametrize("address", ["local", "10.0.0.1", "", "ray://", "ray://head", "a:b", "x:0"])
def test_what_is_no_address_is_refused_with_those_that_are(address: str) -> None:
    with pytest.raises(UsageError, match="no address of a Ray cluster") as caught:
        checked_address(address, "--cluster")
    assert "ray://HOST:10001" in str(caught.value)


def test_a_head_gets_a_port_that_rays_workers_leave_alone() -> None:
    assert (head_port("head", "x"), head_port("head:6400", "x")) == (6379, 6400)
    for address in ("head:", "head:x", "head:0", "head:65536", "head:10002", "head:19999"):
        with pytest.raises(UsageError, match="no port for a head"):
            head_port(address, "x")


def a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayCluster, str]]:
    """A cluster, and the address of its server for Ray clients."""
    folder, port = tmp_path_factory.mktemp("ray"), a_free_port()
    cluster = RayCluster(folder, (f"--ray-client-server-port={port}",))
    try:
        cluster.join("m1")
        yield cluster, f"ray://127.0.0.1:{port}"
    finally:
        cluster.end()


@pytest_asyncio.fixture
async def client(ray: tuple[RayCluster, str]) -> AsyncIterator[RayEngine]:
    engine = RayEngine(RaySettings(ray[1], "t" * 64, leaves_own_out=False))
    yield engine
    await engine.close()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_cluster_is_used_from_outside_through_its_client_server(client: RayEngine) -> None:
    async def first() -> EngineMachine:
        return next(one for one in await client.machines() if one.cpu == 2.0)

    async with asyncio.timeout(240):
        while (machine := await first()).problem:
            await asyncio.sleep(0.2)
        await client.lend(machine.id, "pool-1")
        while not (machine := await first()).address:
            await asyncio.sleep(0.2)
    assert machine.lent_as == "pool-1"
    assert "adds no such machine" in await client.ask_for((MachineKind("cpu", 0, 64.0),))
    assert await client.ask_for(()) == ""
    await client.take_back(machine.id)
    assert (await first()).lent_as == ""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_client", [False, True], ids=["node", "client"])
def test_another_version_is_named_with_both(ray: tuple[RayCluster, str], is_client: bool) -> None:
    cluster, client = ray
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION, client if is_client else cluster.address],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout)["error"]["what"]
    assert "\n" not in said
    assert "ersion mismatch" in said
    assert "2.41.0" in said


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "said", "hint"),
    [
        ("127.0.0.1:1", "nobody answers at 127.0.0.1:1: Connection refused", "ray start"),
        ("ray://127.0.0.1:1", "nobody answers at 127.0.0.1:1", "head serves Ray clients"),
        ("nowhere.invalid:6379", "nowhere.invalid:6379: it is not known", "ray start"),
    ],
)
async def test_where_nobody_answers_that_is_said_at_once(
    address: str, said: str, hint: str
) -> None:
    engine = RayEngine(RaySettings(address, "t" * 64))
    try:
        with pytest.raises(ProviderError) as caught:
            await engine.machines()
    finally:
        await engine.close()
    assert said in caught.value.what
    assert hint in str(caught.value.hint)


@needs_ray
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_auto_without_a_node_of_ray_says_that_none_runs_here(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", ALONE],
        capture_output=True, text=True, check=True,
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "no Ray runs on this machine" in done.stdout
    assert "a node of the cluster must run here" in done.stdout
    assert "Traceback" not in done.stderr
