"""The real nodes do what every `Node` must do: either way of running, in-process and remote."""

import asyncio
import contextlib

import pytest

from nagara.node.agent import AgentServer
from nagara.node.network.client import AgentNetwork
from nagara.node.network.cluster_token import own_token
from nagara.node.network.membership import Membership
from nagara.node.network.server import TcpAgentServer
from nagara.node.remote_node import RemoteNode
from nagara.store.certificates import read_certificates
from nagara.testing.certificates import new_authority
from nagara.testing.node_conformance import NodeConformance

from .conftest import taken_down


@pytest.mark.root
class TestContainerNode(NodeConformance):
    @pytest.fixture
    async def node(self, yard):
        return yard.node


class TestProcessNode(NodeConformance):
    @pytest.fixture
    async def node(self, make_yard):
        yard = make_yard(with_tools=False)
        try:
            yield await yard.open_process_node()
        finally:
            await taken_down(yard)


@pytest.mark.root
class TestRemoteNode(NodeConformance):
    @pytest.fixture
    async def node(self, yard):
        path = yard.state / "agent.sock"
        agent = asyncio.create_task(AgentServer(yard.node, path).run())
        while not path.exists():
            await asyncio.sleep(0.01)
        yield RemoteNode(path)
        agent.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await agent


class TestNodeOverTcp(NodeConformance):
    """The plain processes' node: what a network changes is the same for containers."""

    @pytest.fixture
    async def node(self, make_yard):
        yard = make_yard(with_tools=False)
        own = yard.state / "certificates"
        certificates = read_certificates(new_authority().member(own))
        member = Membership(own_token(yard.state / "token"), certificates)
        try:
            server = TcpAgentServer(await yard.open_process_node(), "127.0.0.1", 0, member)
            agent = asyncio.create_task(server.run())
            async with AgentNetwork(member) as network:
                yield RemoteNode(network.transport(server.address))
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
        finally:
            await taken_down(yard)
