"""Who is no member of the cluster gets nowhere, and is told why as far as he may know it."""

import asyncio
import contextlib
import logging
import socket

import pytest

from nagara.contract.machine import MachineUnreachableError
from nagara.contract.node import NodeUnavailableError
from nagara.node.network import client, server
from nagara.node.network.channel import SILENT_S, SocketChannel, watch_peer
from nagara.node.network.client import AgentNetwork
from nagara.node.network.cluster_token import ClusterToken
from nagara.node.network.hello import greet
from nagara.node.network.membership import Membership
from nagara.node.remote_machine import RemoteMachine
from nagara.node.remote_node import RemoteNode
from nagara.pool.lease import TTL_S
from nagara.testing.fake_node import FakeNode

from .conftest import Cluster, served

STRANGE = Membership(ClusterToken("x" * 64))


async def facts(member, address):
    async with AgentNetwork(member) as network:
        return await RemoteNode(network.transport(address)).facts()


@contextlib.asynccontextmanager
async def talking(agent):
    """A connection to the agent of somebody who knows nothing."""
    reader, writer = await asyncio.open_connection(*agent.address[6:].split(":"))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def rest(reader):
    """What is still said until the agent leaves, politely or not."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


@pytest.mark.parametrize("is_secret", [False, True])
async def test_a_member_is_served_by_any_other(cluster, is_secret):
    async with served(FakeNode(), cluster.member(is_secret=is_secret)) as agent:
        found = await facts(cluster.member(is_secret=is_secret), agent.address)
    assert found.machine == "fake"


async def test_a_caller_with_another_token_is_refused_and_says_nothing(cluster, caplog):
    async with served(FakeNode(), cluster.member()) as agent:
        with pytest.raises(NodeUnavailableError, match="this cluster's token") as caught:
            await facts(STRANGE, agent.address)
    assert agent.address in str(caught.value)
    assert "--token-file" in str(caught.value)


async def test_a_caller_that_proves_nothing_gets_no_answer(cluster, caplog):
    agent = served(FakeNode(), cluster.member())
    async with agent as known, talking(known) as (reader, writer):
        writer.write(b"NAGARA01" + bytes(32))
        await reader.readexactly(72)
        writer.write(bytes(32) + b'{"method": "facts", "arguments": {}}\n')
        assert await rest(reader) == b""
    assert "refused a connection of 127.0.0.1" in caplog.text


async def test_what_was_overheard_does_not_open_a_second_connection(cluster):
    """Replayed: all that a member has sent in its own connection."""
    sent = bytearray()

    class Overheard(SocketChannel):
        async def write(self, data):
            sent.extend(data)
            await super().write(data)

    async with served(FakeNode(), cluster.member()) as agent:
        host, port = agent.address[6:].split(":")
        with socket.create_connection((host, int(port))) as first:
            first.setblocking(False)
            channel = Overheard(first)
            await greet(channel, cluster.token)
            await channel.write(b'{"method": "facts", "arguments": {}}\n')
            assert b"result" in await channel.read_line(10_000)
        async with talking(agent) as (reader, writer):
            writer.write(bytes(sent))
            await reader.readexactly(72)
            assert await rest(reader) == b""


async def test_an_agent_that_only_repeats_what_it_hears_is_no_member(cluster):
    has_left = asyncio.Event()

    async def repeat(reader, writer):
        said = await reader.readexactly(40)
        writer.write(said + cluster.token.proof("control", said[8:], said[8:]))
        assert await rest(reader) == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        has_left.set()

    async with await asyncio.start_server(repeat, "127.0.0.1", 0) as impostor:
        port = impostor.sockets[0].getsockname()[1]
        with pytest.raises(NodeUnavailableError, match="this cluster's token"):
            await facts(cluster.member(), f"tcp://127.0.0.1:{port}")
        await has_left.wait()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x16\x03\x01" + bytes(300)])
async def test_what_speaks_otherwise_is_let_go_and_the_next_one_served(cluster, said):
    async with served(FakeNode(), cluster.member()) as agent:
        async with talking(agent) as (reader, writer):
            writer.write(said)
            if not said:
                writer.write_eof()
            assert await rest(reader) == b""
        assert (await facts(cluster.member(), agent.address)).cores > 0


async def test_a_caller_that_does_not_prove_itself_in_time_is_let_go(cluster, monkeypatch, caplog):
    monkeypatch.setattr(server, "HELLO_S", 0.2)
    async with served(FakeNode(), cluster.member()) as agent, talking(agent) as (reader, _):
        assert await rest(reader) == b""
    assert "in time" in caplog.text


async def test_more_strangers_than_fit_are_sent_away(cluster, monkeypatch, caplog):
    monkeypatch.setattr(server, "MOST_STRANGERS", 2)
    async with served(FakeNode(), cluster.member()) as agent:
        async with talking(agent), talking(agent), talking(agent) as (reader, _):
            assert await rest(reader) == b""
        assert "too many callers" in caplog.text
        async with asyncio.timeout(60):
            while agent._strangers:  # until their leaving was noticed
                await asyncio.sleep(0.01)
        assert (await facts(cluster.member(), agent.address)).cores > 0


# -- TLS -------------------------------------------------------------------------------------


async def test_an_agent_with_certificates_does_not_speak_plainly(cluster, caplog):
    async with served(FakeNode(), cluster.member(is_secret=True)) as agent:
        with pytest.raises(NodeUnavailableError, match="cannot be reached") as caught:
            await facts(cluster.member(), agent.address)
    assert "--certificates" in str(caught.value)
    assert "refused a connection" in caplog.text


async def test_a_caller_with_certificates_does_not_speak_plainly(cluster):
    async with served(FakeNode(), cluster.member()) as agent:
        with pytest.raises(NodeUnavailableError, match="cannot be reached") as caught:
            await facts(cluster.member(is_secret=True), agent.address)
    assert "--certificates" in str(caught.value) or "agent --listen" in str(caught.value)


async def test_certificates_of_another_authority_are_refused_by_both_sides(cluster, tmp_path):
    other = Cluster(tmp_path / "other")
    other.token = cluster.token
    async with served(FakeNode(), cluster.member(is_secret=True)) as agent:
        with pytest.raises(NodeUnavailableError, match="certificate is refused") as caught:
            await facts(other.member(is_secret=True), agent.address)
    assert "ca.pem" in str(caught.value)


async def test_a_callers_certificate_that_is_over_is_refused(cluster, caplog):
    caplog.set_level(logging.WARNING)
    async with served(FakeNode(), cluster.member(is_secret=True)) as agent:
        with pytest.raises(NodeUnavailableError, match=r"TLS failed|closed|reset"):
            await facts(cluster.member(is_secret=True, is_over=True), agent.address)
    assert "refused a connection" in caplog.text


async def test_an_agents_certificate_that_is_over_is_refused(cluster):
    async with served(FakeNode(), cluster.member(is_secret=True, is_over=True)) as agent:
        with pytest.raises(NodeUnavailableError, match="expired"):
            await facts(cluster.member(is_secret=True), agent.address)


async def test_the_token_is_wanted_beside_a_certificate(cluster):
    member = cluster.member(is_secret=True)
    strange = Membership(STRANGE.token, member.certificates)
    async with served(FakeNode(), cluster.member(is_secret=True)) as agent:
        with pytest.raises(NodeUnavailableError, match="this cluster's token"):
            await facts(strange, agent.address)


# -- absence ---------------------------------------------------------------------------------


async def test_an_agent_that_is_not_there_is_unavailable_at_once(cluster):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NodeUnavailableError, match="refused") as caught:
        await facts(cluster.member(), f"tcp://127.0.0.1:{port}")
    assert "nagara agent --listen" in str(caught.value)


async def test_an_agent_that_takes_the_connection_and_says_nothing_is_unavailable(
    cluster, monkeypatch
):
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NodeUnavailableError, match="no connection within"):
            await facts(cluster.member(), address)
        async with AgentNetwork(cluster.member()) as network:
            with pytest.raises(MachineUnreachableError):
                await RemoteMachine(network.transport(address)).renew(())


@pytest.mark.parametrize("address", ["tcp://", "tcp://host", "tcp://host:port", "tcp://host:0"])
async def test_what_is_no_address_is_unavailable_in_words(cluster, address):
    with pytest.raises(NodeUnavailableError, match="no address"):
        await facts(cluster.member(), address)


async def test_connections_are_used_again_and_not_those_that_the_agent_has_left(cluster):
    member = cluster.member()
    async with AgentNetwork(member) as network:
        async with served(FakeNode(), member) as agent:
            port = int(agent.address.rsplit(":", 1)[1])
            node = RemoteNode(network.transport(agent.address))
            for _ in range(3):
                await node.facts()
            assert [len(kept) for kept in network._kept.values()] == [1]
            with pytest.raises(NodeUnavailableError):
                await asyncio.gather(*(node.dial("nobody") for _ in range(3)), node.facts(), _no())
        async with served(FakeNode(), member, port):
            assert (await node.facts()).cores > 0


async def _no():
    raise NodeUnavailableError("only to end the others")


async def test_a_call_ends_with_its_agent(cluster):
    node = FakeNode()
    node.scripts["app"].plain_s = 600
    async with AgentNetwork(cluster.member()) as network:
        async with served(node, cluster.member()) as agent:
            far = RemoteNode(network.transport(agent.address))
            listening = asyncio.ensure_future(anext(far.exits()))
            while not node._listeners:
                await asyncio.sleep(0.01)
        with pytest.raises(NodeUnavailableError, match="ended in the middle"):
            await listening


async def test_both_ends_notice_a_peer_whose_machine_has_gone_silent(cluster, monkeypatch):
    """A cut link sends nothing: only the kernel's own questions end a call that waits."""
    watched = []

    def watch(connection):
        watch_peer(connection)
        watched.append(connection)

    for module in (client, server):
        monkeypatch.setattr(module, "watch_peer", watch)
    async with AgentNetwork(cluster.member()) as network, served(FakeNode(), cluster.member()) as a:
        channel = await network.connect(a.address)
        assert len(watched) == 2
        for end in watched:
            limit_ms = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_ms == 1000 * SILENT_S < 1000 * TTL_S
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= SILENT_S / 2
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        channel.close()
