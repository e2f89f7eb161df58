"""Every way to an agent does what all must do: none at all, a Unix socket, TCP, TCP with TLS."""

import asyncio

import pytest

from nagara.node.agent import AgentServer
from nagara.node.remote_node import RemoteNode
from nagara.testing.agent_conformance import AgentConformance

from .conftest import reaching


class TestInProcess(AgentConformance):
    @pytest.fixture
    async def reach(self):
        async def reach(node):
            return node

        return reach


class TestUnixSocket(AgentConformance):
    @pytest.fixture
    async def reach(self, tmp_path):
        agents = []

        async def reach(node):
            path = tmp_path / "agent.sock"
            agents.append(asyncio.create_task(AgentServer(node, path).run()))
            while not path.exists():
                await asyncio.sleep(0.01)
            return RemoteNode(path)

        yield reach
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


class TestTcp(AgentConformance):
    @pytest.fixture
    async def reach(self, cluster):
        async for reach in reaching(cluster, is_secret=False):
            yield reach


class TestTls(AgentConformance):
    @pytest.fixture
    async def reach(self, cluster):
        async for reach in reaching(cluster, is_secret=True):
            yield reach
