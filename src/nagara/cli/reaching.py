"""The machines that `nagara up` may use, and the ways to their agents.

This one, and those that a pool file's providers have. Files are read here, before the control
process gives up its rights.
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import UsageError
from nagara.node.network.address import is_tcp, socket_path
from nagara.node.network.client import AgentNetwork
from nagara.node.network.membership import read_membership
from nagara.node.remote_machine import RemoteMachine
from nagara.node.remote_node import RemoteNode
from nagara.node.transport import Transport, UnixTransport
from nagara.pool.poolfile import PoolFile, open_providers, own_slots, read_pool_file
from nagara.pool.providers.local import own_offering
from nagara.pool.setup import PoolSetup


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line, checked."""

    slots: int | None
    file: PoolFile | None
    token_file: Path | None
    certificates: Path | None


@dataclass(frozen=True, slots=True)
class Reached:
    """The pool, and the node of each machine by the address that its provider tells."""

    pool: PoolSetup
    nodes: Callable[[str], RemoteNode]


def wanted(
    slots: int | None, pool_file: Path | None, token_file: Path | None, certificates: Path | None
) -> Wanted:
    """Raises `UsageError` for what does not go together, and for a bad pool file."""
    file = None if pool_file is None else read_pool_file(pool_file)
    if file is not None and slots is not None:
        raise UsageError("the pool file says how many slots there are", where="--slots")
    if file is None and (token_file or certificates):
        raise UsageError(
            "there are no other machines to be reached", hint="name them in a pool file: --pool"
        )
    return Wanted(slots, file, token_file, certificates)


@asynccontextmanager
async def reached(state: Path, agent: Path, wish: Wanted) -> AsyncIterator[Reached]:
    """The ways to all machines, open while the context lasts.

    Args:
        agent: socket of this machine's agent.
    """
    async with AsyncExitStack() as stack:
        network: AgentNetwork | None = None
        if wish.file is not None:
            member = read_membership(state, wish.token_file, wish.certificates)
            network = await stack.enter_async_context(AgentNetwork(member))

        def transport(address: str) -> Transport:
            if network is not None and is_tcp(address):
                return network.transport(address)
            return UnixTransport(socket_path(address) if address else agent)

        def agents(name: str, address: str) -> RemoteMachine:
            return RemoteMachine(transport(address))

        yield Reached(_pool(state, wish, agents), lambda address: RemoteNode(transport(address)))


def _pool(state: Path, wish: Wanted, agents: Callable[[str, str], RemoteMachine]) -> PoolSetup:
    """This machine, and what a pool file has beside or instead of it."""
    file = wish.file
    if file is None:
        count = wish.slots or max(4, len(os.sched_getaffinity(0)))
        return PoolSetup(own_offering(count, state), agents)
    here = own_slots(file)
    own = None if here is None else own_offering(here, state)
    return PoolSetup(own, agents, open_providers(file), file.policy)


def agent_options(
    wish: Wanted,
    cache: str | None,
    running: Path | None,
    dns: Sequence[str],
    disk_bytes: int | None,
) -> list[str]:
    """What this machine's own agent is started with.

    Args:
        cache: where it is to serve its objects, if it is.
        running: the socket of an agent that is used instead of an own one.
        dns: resolvers of its replicas.
        disk_bytes: bounds what it keeps on its disk.
    """
    plain = [word for address in dns for word in ("--dns", address)]
    plain += [] if disk_bytes is None else ["--disk-budget", f"{disk_bytes}B"]
    if cache is None:
        return plain
    if running is not None:
        raise UsageError("an agent that runs already is told so itself", where="--cache")
    given = (("--token-file", wish.token_file), ("--certificates", wish.certificates))
    member = [word for name, path in given if path for word in (name, str(path))]
    return [*plain, "--cache", cache, *member]
