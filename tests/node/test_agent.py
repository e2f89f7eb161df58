"""The agent: a node for processes without its rights, over a Unix socket."""

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from nagara.contract.node import NodeError, NodeUnavailableError, ReplicaGoneError, StartFailedError
from nagara.contract.replica import StartKind
from nagara.node.agent import AgentServer
from nagara.node.remote_node import RemoteNode
from nagara.sandbox.unix_socket import connect


class Agent:
    """A running agent server of a yard's node."""

    def __init__(self, yard, **options):
        self.path = yard.state / "agent.sock"
        self.task = asyncio.create_task(AgentServer(yard.node, self.path, **options).run())

    async def end(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def remote(yard):
    """A yard whose orders go through an agent's socket."""
    agent = Agent(yard)
    while not agent.path.exists():
        await asyncio.sleep(0.01)
    yard.through = RemoteNode(agent.path)
    yard.agent = agent
    yield yard
    await agent.end()
    assert not agent.path.exists()


pytestmark = pytest.mark.root


async def test_a_replica_is_started_dialled_listed_and_stopped(remote):
    report = await remote.start()
    assert report.kind is StartKind.PLAIN
    assert (await remote.ask(report.replica)).body == b"ready"
    (status,) = await remote.through.replicas()
    assert status.ready
    assert b"serving" in await remote.through.logs(report.replica)
    assert (await remote.through.facts()) == await remote.node.facts()
    await remote.stop(report.replica)
    assert await remote.through.replicas() == ()
    with pytest.raises(ReplicaGoneError):
        await remote.through.dial(report.replica)


async def test_capture_and_restore_work_through_the_socket(remote):
    assert (await remote.capture()).reason is None
    report = await remote.start()
    assert report.kind is StartKind.RESTORED
    await remote.through.forget_app("default", "obedient")
    await remote.stop(report.replica)


async def test_a_dialled_socket_lives_in_the_replicas_network(remote):
    report = await remote.start()
    dialled = await remote.through.dial(report.replica)
    with dialled:
        assert dialled.getblocking() is False
        assert dialled.getpeername() == ("127.0.0.1", 8000)
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", 8000), timeout=1):
            pass


async def test_dialling_a_port_where_nobody_listens_is_a_refused_connection(remote):
    report = await remote.start()
    code = "import time; threading.Thread(target=time.sleep, args=(60,), daemon=False).start()"
    await remote.tell(report.replica, code)  # so that the process outlives its server
    await remote.tell(report.replica, "threading.Timer(0.05, server.shutdown).start()")
    await remote.tell(report.replica, "threading.Timer(0.2, server.server_close).start()")
    for _ in range(200):
        try:
            (await remote.through.dial(report.replica)).close()
        except ConnectionError:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("the port is still open")


async def test_errors_keep_their_kind_and_words(remote):
    with pytest.raises(StartFailedError, match="exit code 4"):
        await remote.start(remote.spec(command=("sh", "-c", "exit 4")))
    with pytest.raises(NodeError, match="unknown image"):
        await remote.start(remote.spec(image="ext4:x"))


async def test_exits_are_told_as_they_happen(remote):
    report = await remote.start()
    exits = remote.through.exits()
    told = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0.1)
    await remote.tell(report.replica, "threading.Timer(0.05, os._exit, (6,)).start()")
    assert (await asyncio.wait_for(told, 20)).exit_code == 6
    await exits.aclose()


async def test_logs_of_any_bytes_and_of_any_length_arrive(remote):
    code = """
import sys
sys.stdout.buffer.write(bytes(range(256)) * 12000)
sys.stdout.flush()
"""
    report = await remote.start()
    await remote.tell(report.replica, code)
    for _ in range(100):
        log = await remote.through.logs(report.replica, tail_bytes=1 << 30)
        if len(log) >= 2 << 20:
            break
        await asyncio.sleep(0.02)
    assert log.endswith(bytes(range(256)) * 100)


@pytest.mark.parametrize("after_s", [0.05, 0.3])
async def test_cancelling_a_call_cancels_the_start_at_the_agent_and_leaves_nothing(remote, after_s):
    starting = asyncio.ensure_future(remote.start(remote.spec(env={"WAIT_S": "20"})))
    await asyncio.sleep(after_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for _ in range(500):
        if not await remote.through.replicas():
            break
        await asyncio.sleep(0.01)
    assert remote.leftovers() == []


async def test_when_the_agent_ends_its_callers_hear_of_it_and_half_made_replicas_go(remote):
    starting = asyncio.ensure_future(remote.start(remote.spec(env={"WAIT_S": "20"})))
    await asyncio.sleep(0.3)
    await remote.agent.end()
    with pytest.raises(NodeUnavailableError, match="ended in the middle"):
        await starting
    assert remote.leftovers() == []
    with pytest.raises(NodeUnavailableError, match="cannot be reached") as caught:
        await remote.through.facts()
    assert "nagara agent" in str(caught.value)


async def test_many_calls_at_once_do_not_disturb_each_other(remote):
    report = await remote.start()
    answers = await asyncio.gather(*(remote.ask(report.replica) for _ in range(60)))
    assert {answer.body for answer in answers} == {b"ready"}


@pytest.mark.parametrize(
    "line",
    [b"\n", b"nonsense\n", b'{"method": "reboot", "arguments": {}}\n', b'{"method": "stop"}\n'],
)
async def test_what_is_no_request_gets_an_error(remote, line):
    def talk():
        with connect(remote.agent.path, timeout_s=10) as connection:
            connection.sendall(line)
            return connection.makefile("rb").readline()

    assert "error" in json.loads(await asyncio.to_thread(talk))
    assert (await remote.through.facts()).isolation == "container"


async def test_callers_that_say_nothing_or_half_a_line_hold_nobody_up(remote):
    idle = [connect(remote.agent.path, timeout_s=10) for _ in range(20)]
    for connection in idle[10:]:
        connection.sendall(b'{"method"')
    assert (await remote.through.facts()).cores > 0
    for connection in idle:
        connection.close()
    assert await remote.through.replicas() == ()


CALLER = """
import asyncio, json, os, sys
from pathlib import Path
from nagara.contract.node import NodeUnavailableError
from nagara.contract.replica import *
from nagara.node.remote_node import RemoteNode
from nagara.node import wire
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path, app = sys.argv[1], sys.argv[2]
async def main():
    node = RemoteNode(Path(path))
    try:
        facts = await node.facts()
    except NodeUnavailableError as error:
        print("refused:", error.what)
        return
    spec = ReplicaSpec(
        tenant="default", app="obedient", definition="d", image="host",
        command=("python", "-S", "-c", app), port=8000, ready_path="/", canary=Canary("/canary"),
        env=(("LISTEN", "8000"),),
    )
    report = await node.start(StartOrder(sys.argv[3], Lease("s", 1), spec))
    dialled = await node.dial(report.replica)
    reader, writer = await asyncio.open_connection(sock=dialled)
    writer.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
    print((await reader.read()).decode().splitlines()[-1])
    writer.close()
    await node.stop(report.replica, grace_s=0)
asyncio.run(main())
"""


async def as_ordinary_user(yard, path):
    from .conftest import APP

    for folder in (yard.state, *yard.state.parents):
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALLER, str(path), APP, yard.name()), stdout=-1, stderr=-1
    )
    out, error = await child.communicate()
    assert child.returncode == 0, error.decode()
    return out.decode().strip()


async def test_an_ordinary_user_who_is_allowed_drives_containers_through_it(yard):
    agent = Agent(yard, allowed_uids=(65534,), owner=65534)
    while not agent.path.exists():
        await asyncio.sleep(0.01)
    try:
        assert await as_ordinary_user(yard, agent.path) == "ready"
    finally:
        await agent.end()
    assert yard.leftovers() == []


async def test_a_stranger_is_refused_even_where_the_socket_would_let_him_in(yard):
    agent = Agent(yard)
    while not agent.path.exists():
        await asyncio.sleep(0.01)
    agent.path.chmod(0o666)
    try:
        said = await as_ordinary_user(yard, agent.path)
    finally:
        await agent.end()
    assert said.startswith("refused: the node agent ended in the middle of a call")
    assert await yard.node.replicas() == ()
    assert os.getuid() == 0
