"""The machines that `nagara up` may use, and the ways to their agents.

This one, those that a pool file's providers have, and those of a Ray cluster. Files are read here,
before the control process gives up its rights.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nagara.base.errors import UsageError
from nagara.cli.cluster.address import CLIENT, HEAD, checked_address, head_port
from nagara.cli.cluster.engine import RayEngine, RaySettings, require_ray
from nagara.cli.cluster.head import own_head
from nagara.node.mandate import Mandate
from nagara.node.network.address import is_tcp, socket_path
from nagara.node.network.client import AgentNetwork
from nagara.node.network.membership import Membership, read_membership
from nagara.node.remote_machine import RemoteMachine
from nagara.node.remote_node import RemoteNode
from nagara.node.transport import Transport, UnixTransport
from nagara.pool.poolfile import (
    Engines,
    PoolFile,
    open_providers,
    own_slots,
    ray_tables,
    read_pool_file,
)
from nagara.pool.providers.local import own_offering
from nagara.pool.providers.ray import RayProvider
from nagara.pool.setup import PoolSetup
from nagara.pool.sizing import Policy


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line, checked."""

    slots: int | None
    file: PoolFile | None
    cluster: str | None
    token_file: Path | None
    certificates: Path | None

    @property
    def has_others(self) -> bool:
        """Whether there may be machines beside this one."""
        return self.file is not None or self.cluster is not None


@dataclass(frozen=True, slots=True)
class Reached:
    """The pool, and the node of each machine by the address that its provider tells."""

    pool: PoolSetup
    nodes: Callable[[str], RemoteNode]


def wanted(
    slots: int | None,
    pool_file: Path | None,
    cluster: str | None,
    token_file: Path | None,
    certificates: Path | None,
) -> Wanted:
    """Raises `UsageError` for what does not go together, and for a bad pool file."""
    file = None if pool_file is None else read_pool_file(pool_file)
    if file is not None and slots is not None:
        raise UsageError("the pool file says how many slots there are", where="--slots")
    wish = Wanted(slots, file, cluster, token_file, certificates)
    if not wish.has_others and (token_file or certificates):
        raise UsageError(
            "there are no other machines to be reached", hint="name them: --pool or --cluster"
        )
    in_ray = [] if file is None else ray_tables(file)
    if cluster is not None and file is not None and not in_ray:
        raise UsageError(
            "the pool file has no provider of the kind ray", where="--cluster",
            hint='add [provider.cluster] with kind = "ray" to it',
        )  # fmt: skip
    if cluster is None and any("address" not in one for one in in_ray):
        raise UsageError("the cluster's address is not said", hint="add --cluster ADDRESS")
    if cluster is not None and head_port(cluster, "--cluster") is None:
        checked_address(cluster, "--cluster")
    for table in in_ray if cluster is None else ():
        checked_address(table["address"], "address")
    if cluster is not None or in_ray:
        require_ray()
    return wish


@asynccontextmanager
async def reached(
    state: Path, agent: Path, wish: Wanted, mandate: Mandate
) -> AsyncIterator[Reached]:
    """The ways to all machines, open while the context lasts.

    Args:
        agent: socket of this machine's agent.
        mandate: by what right they are called.
    """
    async with AsyncExitStack() as stack:
        network: AgentNetwork | None = None
        engines: Engines | None = None
        if wish.has_others:
            member = read_membership(state, wish.token_file, wish.certificates)
            network = await stack.enter_async_context(AgentNetwork(member))
            engines = await _engines(state, wish, member, stack)

        def transport(address: str) -> Transport:
            if network is not None and is_tcp(address):
                return network.transport(address)
            return UnixTransport(socket_path(address) if address else agent)

        def agents(name: str, address: str) -> RemoteMachine:
            return RemoteMachine(transport(address), mandate)

        pool = _pool(state, wish, agents, engines)
        yield Reached(pool, lambda address: RemoteNode(transport(address), mandate))


def _pool(
    state: Path,
    wish: Wanted,
    agents: Callable[[str, str], RemoteMachine],
    engines: Engines | None,
) -> PoolSetup:
    """This machine, and what there is beside or instead of it."""
    file = wish.file
    if file is not None:
        here = own_slots(file)
        own = None if here is None else own_offering(here, state)
        return PoolSetup(own, agents, open_providers(file, engines), file.policy)
    own = own_offering(wish.slots or max(4, len(os.sched_getaffinity(0))), state)
    if engines is None:
        return PoolSetup(own, agents)
    # One machine beside this one is kept ready; more of the cluster's come as they are needed.
    policy = Policy(least_free=own.devices + 1)
    return PoolSetup(own, agents, (RayProvider("ray", engines({})),), policy)


async def _engines(
    state: Path, wish: Wanted, member: Membership, stack: AsyncExitStack
) -> Engines | None:
    """How Ray is reached, for each provider of its kind."""
    given = wish.cluster
    port = None if given is None else head_port(given, "--cluster")
    if port is not None:
        given = await asyncio.to_thread(own_head, state, port)
        click.echo(f"Ray's head serves at {given}, also when nagara has ended; `ray stop` ends it")
        click.echo(f"other machines join with: ray start --address={given}")
    engines: list[RayEngine] = []

    def engine(table: Mapping[str, Any]) -> RayEngine:
        folder = table.get("certificates") or wish.certificates
        address = given or table["address"]
        settings = RaySettings(
            address=address,
            token=member.token.value,
            port=table.get("port", 0),
            certificates=None if folder is None else str(Path(folder).absolute()),
            state=table.get("state"),
            leaves_own_out=not address.startswith(CLIENT),
        )
        engines.append(opened := RayEngine(settings))
        return opened

    async def close() -> None:
        for one in engines:
            await one.close()

    stack.push_async_callback(close)
    has_any = given is not None or (wish.file is not None and bool(ray_tables(wish.file)))
    return engine if has_any else None


def agent_options(
    wish: Wanted,
    cache: str | None,
    running: Path | None,
    dns: Sequence[str],
    disk_bytes: int | None,
) -> list[str]:
    """What this machine's own agent is started with.

    Args:
        cache: where it is to serve its objects; None: wherever the cluster's other machines reach
            it, if there is a cluster.
        running: the socket of an agent that is used instead of an own one.
        dns: resolvers of its replicas.
        disk_bytes: bounds what it keeps on its disk.
    """
    plain = [word for address in dns for word in ("--dns", address)]
    plain += [] if disk_bytes is None else ["--disk-budget", f"{disk_bytes}B"]
    if cache is None and wish.cluster is not None and running is None:
        cache = _own_cache(wish.cluster)
    if cache is None:
        return plain
    if running is not None:
        raise UsageError("an agent that runs already is told so itself", where="--cache")
    given = (("--token-file", wish.token_file), ("--certificates", wish.certificates))
    member = [word for name, path in given if path for word in (name, str(path))]
    return [*plain, "--cache", cache, *member]


def _own_cache(cluster: str) -> str | None:
    """This machine as others of a Ray cluster see it, at any port; None: that is not known."""
    named = cluster.removeprefix(CLIENT).rpartition(":")[0]
    elsewhere = named if named not in ("", HEAD) else "192.0.2.1"  # nobody's, by RFC 5737
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((elsewhere, 9))  # sends nothing; the way there decides
            host = str(asking.getsockname()[0])
    except OSError:
        return None
    return None if host.startswith("127.") else f"{host}:0"
