"""`nagara agent`: this machine's node, offered to control processes here and elsewhere.

Ends on SIGTERM or SIGINT, or with the `nagara up` that has started it. Replicas go on without it
and are taken over by the next one; a keeper that has no replica left ends with it.
"""

import asyncio
import ipaddress
import logging
import os
import pwd
import signal
from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.base.folder_lock import only_holder
from nagara.base.units import parse_size_bytes
from nagara.cli.agent_record import recorded
from nagara.cli.machine_checks import checks_of_machine, running_monitor
from nagara.cli.settings import Settings
from nagara.node.agent import AgentServer
from nagara.node.build import build_node, keeper_of
from nagara.node.control_epochs import FILE_NAME as EPOCHS_FILE
from nagara.node.control_epochs import ControlEpochs
from nagara.node.local_node import LocalNode
from nagara.node.machine import LocalMachine
from nagara.node.machine_faults import as_node_error
from nagara.node.network.address import split_address
from nagara.node.network.membership import Membership, read_membership
from nagara.node.network.server import TcpAgentServer
from nagara.node.zone import NO_MEMBER, Member, serving_objects
from nagara.store.zone import member_token

Offer = tuple[str, int, Membership]  # where to be reached from other machines, and by whom

_log = logging.getLogger(__name__)


def agent_socket(state: Path) -> Path:
    """Where the agent of a state folder listens unless told otherwise."""
    return state / "agent.sock"


def addresses(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Checks that name servers are named by IPv4 addresses."""
    for address in given:
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            raise click.BadParameter(f"{address!r} is no IPv4 address", param=option) from None
    return given


def size(_: click.Context, option: click.Parameter, given: str | None) -> int | None:
    """Reads a size such as `200GB`."""
    try:
        return None if given is None else parse_size_bytes(given)
    except UsageError as error:
        raise click.BadParameter(error.what, param=option) from None


# Options that `nagara up` has, too: it hands them to the agent that it starts.
dns_option = click.option(
    "--dns",
    metavar="ADDRESS",
    multiple=True,
    callback=addresses,
    help="A name server for replicas that may call out; may be repeated  [default: the machine's]",
)
certificates_option = click.option(
    "--certificates",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder with ca.pem, cert.pem and key.pem: other machines are spoken to by TLS only.",
)
disk_budget_option = click.option(
    "--disk-budget",
    metavar="SIZE",
    callback=size,
    help="Bound logs, store, snapshots and old versions of this machine together (200GB); what "
    "nobody needs goes, the oldest first  [default: none]",
)


@click.command()
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to listen  [default: agent.sock in the state folder]",
)
@click.option(
    "--allow-user",
    metavar="NAME",
    help="A user whose control process may use this agent: it can then run commands in "
    "containers with this agent's rights.",
)
@dns_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Be reachable from other machines there, too; port 0 takes a free one, and says which.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The secret that the cluster's agents and control processes share  "
    "[default: cluster-token in the state folder, made if it is not there]",
)
@certificates_option
@disk_budget_option
@click.option(
    "--cache",
    metavar="HOST:PORT",
    help="Serve this machine's images, models and snapshots to the others there.",
)
@click.option("--end-with-input", is_flag=True, hidden=True)
@click.pass_obj
def agent(
    settings: Settings,
    path: Path | None,
    allow_user: str | None,
    dns: tuple[str, ...],
    disk_budget: int | None,
    listen: str | None,
    token_file: Path | None,
    certificates: Path | None,
    cache: str | None,
    end_with_input: bool,
) -> None:
    """Run this machine's node agent alone."""
    owner = _user_id(allow_user) if allow_user else None
    at = None if listen is None else split_address(listen, is_own=True)
    serves_at = None if cache is None else split_address(cache, is_own=True)
    if at is None and serves_at is None and (token_file or certificates):
        raise UsageError("other machines are not served", hint="add --listen HOST:PORT")
    hint = "another agent serves this state folder: is `nagara up` running already?"
    try:
        with only_holder(settings.state / "node", "agent.lock", hint):
            socket = path or agent_socket(settings.state)
            offer: Offer | None = None
            member = NO_MEMBER
            if at is not None or serves_at is not None:
                cluster = read_membership(settings.state, token_file, certificates)
                offer = None if at is None else (*at, cluster)
                token = member_token(cluster.token.value.encode())
                member = Member(token, certificates, serves_at)
            with serving_objects(settings.state / "store", member) as member:
                node = build_node(settings.state, dns, member)
                node.budget.limit_bytes = disk_budget
                served = _serve(
                    node, settings.state, socket, owner, offer, end_with_input=end_with_input
                )
                asyncio.run(served)
    except OSError as error:  # a state folder that cannot be written
        raise as_node_error(error) from error


async def _serve(
    node: LocalNode,
    state: Path,
    path: Path,
    owner: int | None,
    offer: Offer | None,
    *,
    end_with_input: bool,
) -> None:
    await node.open()
    try:
        allowed = () if owner is None else (owner,)
        with running_monitor(state) as monitor:
            checks = checks_of_machine(node, state)
            machine = LocalMachine(node, keeper_of(state), checks, monitor.take)
            epochs = ControlEpochs(state / "node" / EPOCHS_FILE)
            agent = AgentServer(
                node, path, allowed_uids=allowed, owner=owner, machine=machine, epochs=epochs
            )
            servers: list[AgentServer | TcpAgentServer] = [agent]
            address = ""
            if offer is not None:
                servers.append(far := TcpAgentServer(node, *offer, machine=machine, epochs=epochs))
                address = far.address
                click.echo(f"nagara agent listens at {address}")
            for gap in (await node.facts()).missing:
                _log.info("without %s", gap)
            with recorded(state, address):
                await _run(servers, end_with_input=end_with_input)
    finally:
        await node.close(stop_replicas=False)


async def _run(servers: list[AgentServer | TcpAgentServer], *, end_with_input: bool) -> None:
    """Serves until a signal, or the end of the input."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(server.run())

    serving = asyncio.ensure_future(run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    if end_with_input:
        _watch_input(loop, serving)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


def _watch_input(loop: asyncio.AbstractEventLoop, server: asyncio.Future[None]) -> None:
    """Ends the server when whoever holds the other end of standard input has ended.

    A signal at the parent's end would not do: a parent that has given up root may not send one.
    """

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            server.cancel()

    loop.add_reader(0, read)


def _user_id(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UsageError("there is no such user", where=f"--allow-user {name}") from None
