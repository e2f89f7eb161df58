"""Every way to an agent does what all must do: none at all, a Unix socket, TCP, TCP with TLS."""

import asyncio

import pytest

from nagara.node.agent import AgentServer
from nagara.node.mandate import Mandate
from nagara.node.remote_node import RemoteNode
from nagara.testing.agent_conformance import AgentConformance
from nagara.testing.epoch_conformance import EpochConformance

from .conftest import offering


class TestInProcess(AgentConformance):
    @pytest.fixture
    async def reach(self):
        async def reach(node):
            return node

        return reach


class Apart(AgentConformance, EpochConformance):
    """Ways to another process."""

    @pytest.fixture
    def reach(self, offer):
        async def reach(node):
            return (await offer(node))(Mandate())

        return reach


class TestUnixSocket(Apart):
    @pytest.fixture
    async def offer(self, tmp_path):
        agents = []

        async def offer(node):
            path = tmp_path / "agent.sock"
            agents.append(asyncio.create_task(AgentServer(node, path).run()))
            while not path.exists():
                await asyncio.sleep(0.01)
            return lambda mandate: RemoteNode(path, mandate)

        yield offer
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


class TestTcp(Apart):
    @pytest.fixture
    async def offer(self, cluster):
        async for offer in offering(cluster, is_secret=False):
            yield offer


class TestTls(Apart):
    @pytest.fixture
    async def offer(self, cluster):
        async for offer in offering(cluster, is_secret=True):
            yield offer
