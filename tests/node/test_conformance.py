"""The real nodes do what every `Node` must do: either way of running, in-process and remote."""

import asyncio
import contextlib

import pytest

from nagara.node.agent import AgentServer
from nagara.node.remote_node import RemoteNode
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
