"""Replicas that may call out, plainly started and put back, and what is left of it after a crash.

The node's agent runs in a network of the tests' own: see `network_lab`.
"""

import asyncio
import os
import signal
import sys

import pytest
from network_lab import MACHINE, NAME, OUTSIDE, NetworkLab

from nagara.contract.node import NodeError, NodeUnavailableError
from nagara.contract.replica import StartKind
from nagara.node.leftovers import owned_by
from nagara.node.remote_node import RemoteNode
from nagara.sandbox.egress import INSIDE, find_nft

from .conftest import Yard, processes_naming

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(find_nft() is None, reason="needs nft (package nftables)"),
]

# What a replica has open when it is saved: a connection, and a socket bound to its own address.
FIRST = f"""
import json, socket
line = socket.create_connection(("{OUTSIDE}", 80), timeout=20)
bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); bound.bind(("{INSIDE}", 5555))
def call(name="{OUTSIDE}"):
    with socket.create_connection((name, 80), timeout=20) as caller:
        caller.sendall(b"hello")
        said = caller.makefile().readline().strip()
        return [*json.loads(said)[:1], caller.getsockname()[0]]
"""
CALL = f"answer = [call(), call({NAME!r}), bound.getsockname()[0]]"
CALL_NOBODY = """
import socket
answer = []
for name in ("203.0.113.9", "203.0.113.1", "outside.test"):
    try:
        socket.create_connection((name, 80), timeout=0.5).close()
        answer.append("reached")
    except OSError as error:
        answer.append(type(error).__name__)
"""


class Street:
    """A yard whose agent is a process in the lab's machine."""

    def __init__(self, yard: Yard, lab: NetworkLab) -> None:
        self.yard, self.lab = yard, lab
        self.agent = None

    async def begin(self):
        command = (sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(self.yard.state))
        self.agent = self.lab.run(*command, "agent", "--dns", OUTSIDE)
        self.yard.through = node = RemoteNode(self.yard.state / "agent.sock")
        while True:
            try:
                return await node.facts()
            except NodeUnavailableError:
                assert self.agent.poll() is None
                await asyncio.sleep(0.05)

    async def end(self, number=signal.SIGTERM):
        if self.agent is not None:
            self.agent.send_signal(number)
            await asyncio.to_thread(self.agent.wait)
            self.agent = None


@pytest.fixture
async def street(make_yard, tools):
    lab = NetworkLab()
    street = Street(make_yard(), lab)
    try:
        await street.begin()
        yield street
        for status in await street.yard.through.replicas():
            await street.yard.stop(status.replica)
        await street.end()
        assert lab.here(owned_by, street.yard.state) == []
        assert lab.left() == []
    finally:
        await street.end(signal.SIGKILL)
        street.yard.force_away()
        lab.close()


async def test_replicas_that_may_call_out_do_and_so_do_clones_side_by_side(street):
    yard = street.yard
    spec = yard.spec(network="egress", env={"HOOKS": "1", "FIRST": FIRST})
    plain = await yard.start(spec)
    assert await yard.tell(plain.replica, CALL) == [[MACHINE, INSIDE], [MACHINE, INSIDE], INSIDE]
    captured = await yard.capture(spec)
    assert captured.reason is None
    (snapshot,) = yard.command("ls")
    assert any("outside connection" in note for note in snapshot["reasons"])
    clones = [await yard.start(spec) for _ in range(2)]
    assert [(c.kind, c.fallback) for c in clones] == [(StartKind.RESTORED, None)] * 2
    for report in (*clones, plain):
        answer = await yard.tell(report.replica, CALL)
        assert answer == [[MACHINE, INSIDE], [MACHINE, INSIDE], INSIDE]
    assert len(street.lab.links()) == 3


async def test_a_replica_may_call_nobody_unless_its_app_says_so(street):
    report = await street.yard.start(street.yard.spec(network="none"))
    answer = await street.yard.tell(report.replica, CALL_NOBODY)
    assert answer == ["OSError", "OSError", "gaierror"]
    assert street.lab.left() == []


async def test_a_start_that_cannot_be_given_a_way_out_says_why_and_leaves_nothing(street):
    street.lab.forward(False)
    with pytest.raises(NodeError, match="does not forward packets"):
        await street.yard.start(street.yard.spec(network="egress"))
    assert street.yard.leftovers() == []
    assert street.lab.left() == []


async def test_after_everything_was_killed_the_next_agent_leaves_nothing_of_it(street):
    yard = street.yard
    spec = yard.spec(network="egress", env={"FIRST": FIRST})
    report = await yard.start(spec)
    await street.end(signal.SIGKILL)
    # The replica goes on, and so does its way out.
    await street.begin()
    assert await yard.tell(report.replica, CALL) == [[MACHINE, INSIDE], [MACHINE, INSIDE], INSIDE]
    await street.end(signal.SIGKILL)
    for pid in processes_naming(f"{yard.state}/node/keeper.sock", of_keeper=True):
        os.kill(pid, signal.SIGKILL)
    owned = street.lab.here(owned_by, yard.state)
    assert "network rules" in [thing.kind for thing in owned]
    await street.begin()
    assert street.lab.left() == []
    assert street.lab.here(owned_by, yard.state) == []
