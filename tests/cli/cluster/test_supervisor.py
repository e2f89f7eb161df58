"""A machine that is lent runs an agent, whoever starts, watches or ends it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.cli.agent_record import running_agent
from nagara.cli.cluster.supervisor import Lent, Supervisor
from nagara.node.network.cluster_token import read_token

TOKEN = "t" * 64


def until(condition, what: str, limit_s: float = 90.0):
    """Waits for it; what it gave."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, what
        time.sleep(0.02)
    return found


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if (agent := running_agent(tmp_path)) is not None:
        os.kill(agent.pid, signal.SIGTERM)
        until(lambda: running_agent(tmp_path) is None, "the agent does not end")


@pytest.fixture
def supervisor(state: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(state, "127.0.0.1")
    yield supervisor
    supervisor.take_back()
    supervisor.close()


def address_of(supervisor: Supervisor) -> str:
    return until(lambda: supervisor.status()["address"], f"no agent: {supervisor.status()}")


def test_a_machine_that_is_not_lent_runs_none(supervisor: Supervisor) -> None:
    assert supervisor.status() == {"lent_as": "", "address": "", "version": "", "problem": ""}
    supervisor.take_back()


def test_one_that_is_lent_runs_an_agent_until_it_is_taken_back(
    supervisor: Supervisor, state: Path
) -> None:
    assert supervisor.lend(Lent("pool-1"), TOKEN)
    address = address_of(supervisor)
    assert address.startswith("tcp://127.0.0.1:")
    assert supervisor.status()["lent_as"] == "pool-1"
    assert read_token(state / "cluster-token").value == TOKEN
    assert supervisor.lend(Lent("pool-1"), TOKEN)
    assert not supervisor.lend(Lent("pool-2"), TOKEN)
    supervisor.take_back()
    until(lambda: running_agent(state) is None, "the agent does not end")
    assert supervisor.status()["lent_as"] == ""
    assert supervisor.lend(Lent("pool-2"), TOKEN)
    assert address_of(supervisor)


def test_a_killed_agent_comes_back_at_its_address(supervisor: Supervisor, state: Path) -> None:
    supervisor.lend(Lent("pool-1"), TOKEN)
    address = address_of(supervisor)
    until((state / "node" / "agent.port").exists, "its port is not remembered")
    killed = running_agent(state)
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)

    def is_back() -> bool:
        agent = running_agent(state)
        return agent is not None and agent.pid != killed.pid

    until(is_back, "no new agent")
    assert address_of(supervisor) == address


def test_an_agent_belongs_to_nobody_and_is_taken_over(supervisor: Supervisor, state: Path) -> None:
    supervisor.lend(Lent("pool-1"), TOKEN)
    address_of(supervisor)
    supervisor.close()
    agent = running_agent(state)
    assert agent is not None
    status = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
    parent, _, session = (int(field) for field in status[1:4])
    assert parent != os.getpid()
    assert session == agent.pid
    second = Supervisor(state, "127.0.0.1")
    try:
        assert second.status()["lent_as"] == "pool-1"
        assert second.status()["address"] == agent.address
        assert running_agent(state) == agent
    finally:
        second.take_back()
        second.close()


def test_why_an_agent_does_not_start_is_told(supervisor: Supervisor) -> None:
    supervisor.lend(Lent("pool-1", certificates="/absent"), TOKEN)
    problem = until(lambda: supervisor.status()["problem"], "no problem is told")
    assert "/absent: there is no such folder" in problem
    assert supervisor.status()["address"] == ""
    supervisor.take_back()
    assert supervisor.status()["problem"] == "", "it could never be lent again"


def test_one_that_is_taken_back_at_once_can_be_lent_again(
    supervisor: Supervisor, state: Path
) -> None:
    for number in range(3):
        assert supervisor.lend(Lent(f"pool-{number}"), TOKEN)
        supervisor.take_back()
        assert supervisor.status()["problem"] == ""
    assert supervisor.lend(Lent("pool-4"), TOKEN)
    assert address_of(supervisor)


def test_a_number_that_was_used_again_is_not_taken_for_the_agent(state: Path) -> None:
    (state / "node").mkdir()
    record = f'{{"pid": {os.getpid()}, "began": 1, "address": "tcp://x:1", "version": "0"}}'
    (state / "node" / "agent.json").write_text(record)
    assert running_agent(state) is None
    (state / "node" / "agent.json").unlink()
