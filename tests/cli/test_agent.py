"""`nagara agent` as a process: killed and followed, refused where it cannot work."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.machine import MachineUnreachableError
from nagara.contract.node import DeposedError, NodeUnavailableError
from nagara.contract.replica import Canary, Lease, ReplicaSpec, StartOrder
from nagara.node.mandate import Mandate
from nagara.node.network.client import AgentNetwork
from nagara.node.network.membership import read_membership
from nagara.node.remote_machine import RemoteMachine
from nagara.node.remote_node import RemoteNode
from nagara.testing import small_server
from nagara.testing.certificates import new_authority

SERVER = str(Path(small_server.__file__).resolve())


def agent(state: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "agent", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def until_it_answers(node: RemoteNode) -> None:
    for _ in range(1000):
        try:
            await node.facts()
        except NodeUnavailableError:
            await asyncio.sleep(0.02)
        else:
            return
    raise AssertionError("the agent does not answer")


async def test_an_agent_that_is_killed_is_followed_by_one_that_takes_its_replica_over(
    tmp_path: Path,
) -> None:
    node = RemoteNode(tmp_path / "agent.sock")
    spec = ReplicaSpec(
        tenant="default",
        app="steady",
        definition="d",
        image="host",
        command=(sys.executable, SERVER, "${PORT}"),
        port=8000,
        ready_path="/health",
        canary=Canary("/health"),
        start_timeout_s=60.0,
    )
    name = f"cli-{os.getpid()}"
    first = second = agent(tmp_path)
    try:
        await until_it_answers(node)
        await node.start(StartOrder(name, Lease("s", 1), spec))
        first.kill()
        first.communicate()
        second = agent(tmp_path)
        await until_it_answers(node)
        (status,) = await node.replicas()
        assert (status.replica, status.ready) == (name, True)
        (await node.dial(name)).close()
        await node.stop(name, grace_s=0)
    finally:
        first.kill()
        second.send_signal(signal.SIGTERM)
        _, said = second.communicate(timeout=60)
    assert b"Traceback" not in said
    assert second.returncode == 0


def test_a_second_agent_on_one_state_folder_is_refused(tmp_path: Path) -> None:
    first = agent(tmp_path)
    try:
        asyncio.run(until_it_answers(RemoteNode(tmp_path / "agent.sock")))
        second = agent(tmp_path)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 1
        assert str(tmp_path) in said.decode()
        assert "hint:" in said.decode()
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=60)


@pytest.mark.root
def test_a_state_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], check=True)
    try:
        refused = agent(tmp_path)
        _, said = refused.communicate(timeout=60)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert refused.returncode == 1
    assert "Read-only file system" in said.decode()
    assert "--state" in said.decode()
    assert "Traceback" not in said.decode()


async def test_an_agent_that_listens_is_reached_over_tcp_by_who_has_its_files(
    tmp_path: Path,
) -> None:
    authority = new_authority()
    own = authority.member(tmp_path / "own")
    running = agent(tmp_path, "--listen", "127.0.0.1:0", "--certificates", str(own))
    try:
        assert running.stdout is not None
        line = await asyncio.to_thread(running.stdout.readline)
        address = line.decode().split()[-1]
        member = read_membership(tmp_path, None, authority.member(tmp_path / "other"))
        async with AgentNetwork(member) as network:
            far = RemoteNode(network.transport(address))
            await until_it_answers(far)
            assert await far.facts() == await RemoteNode(tmp_path / "agent.sock").facts()
            marks = [await RemoteMachine(network.transport(address)).renew(()) for _ in range(2)]
            assert marks[0].mark_s < marks[1].mark_s
    finally:
        running.terminate()
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0
    assert b"Traceback" not in said


async def test_a_control_process_that_was_deposed_over_one_way_is_refused_over_all_and_for_good(
    tmp_path: Path,
) -> None:
    old, new = Mandate(), Mandate()
    old.epoch = lambda: ControlEpoch("one", 1)
    new.epoch = lambda: ControlEpoch("one", 2)
    running = agent(tmp_path, "--listen", "127.0.0.1:0")
    try:
        assert running.stdout is not None
        address = (await asyncio.to_thread(running.stdout.readline)).decode().split()[-1]
        async with AgentNetwork(read_membership(tmp_path, None, None)) as network:
            far = RemoteMachine(network.transport(address), old)
            await until_it_answers(RemoteNode(tmp_path / "agent.sock"))
            assert (await far.renew(())).mark_s > 0
            await RemoteNode(tmp_path / "agent.sock", new).facts()
            with pytest.raises(MachineUnreachableError, match="newer control process"):
                await far.renew(())
        running.kill()
        running.communicate()
        running = agent(tmp_path)
        await until_it_answers(RemoteNode(tmp_path / "agent.sock"))
        with pytest.raises(DeposedError):
            await RemoteNode(tmp_path / "agent.sock", old).stop("nobody")
        await RemoteNode(tmp_path / "agent.sock", new).stop("nobody")
    finally:
        running.terminate()
        running.communicate(timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "nowhere"], "nowhere: this is no address of an agent"),
        (["--token-file", "t"], "add --listen"),
        (["--listen", "127.0.0.1:0", "--token-file", "/absent/token"], "/absent/token"),
        (["--listen", "127.0.0.1:0", "--certificates", "/absent"], "/absent: there is no such"),
        (["--listen", "192.0.2.1:9300"], "tcp://192.0.2.1:9300: cannot listen"),
    ],
)
def test_what_an_agent_cannot_listen_with_is_named(
    tmp_path: Path, options: list[str], said: str
) -> None:
    ended = agent(tmp_path, *options)
    _, error = ended.communicate(timeout=60)
    assert ended.returncode == 2
    assert said in error.decode()
    assert "Traceback" not in error.decode()
