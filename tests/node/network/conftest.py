"""Members of a test's cluster, and nodes offered to them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from nagara.contract.node import Node
from nagara.node.mandate import Mandate
from nagara.node.network.client import AgentNetwork
from nagara.node.network.cluster_token import ClusterToken
from nagara.node.network.membership import Membership
from nagara.node.network.server import TcpAgentServer
from nagara.node.remote_node import RemoteNode
from nagara.store.certificates import read_certificates
from nagara.testing.certificates import Authority, new_authority


class Cluster:
    """Makes members of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = ClusterToken(secrets.token_hex(32))
        self.authority: Authority = new_authority()

    def member(self, *, is_secret: bool = False, **options: bool) -> Membership:
        """With `is_secret`, one with a certificate of its own."""
        if not is_secret:
            return Membership(self.token)
        folder = self.authority.member(self.folder / secrets.token_hex(4), **options)
        return Membership(self.token, read_certificates(folder))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@asynccontextmanager
async def served(node: Node, member: Membership, port: int = 0) -> AsyncIterator[TcpAgentServer]:
    """The node's agent at a loopback address, while the context lasts."""
    server = TcpAgentServer(node, "127.0.0.1", port, member)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def offering(
    cluster: Cluster, *, is_secret: bool
) -> AsyncIterator[Callable[[Node], Awaitable[Callable[[Mandate], Node]]]]:
    """Offers nodes to control processes that are another member of the cluster."""
    async with AsyncExitStack() as stack:
        member = cluster.member(is_secret=is_secret)
        network = await stack.enter_async_context(AgentNetwork(member))

        async def offer(node: Node) -> Callable[[Mandate], Node]:
            own = cluster.member(is_secret=is_secret)
            server = await stack.enter_async_context(served(node, own))
            return lambda mandate: RemoteNode(network.transport(server.address), mandate)

        yield offer
