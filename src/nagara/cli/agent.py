"""`nagara agent`: this machine's node, offered at a Unix socket to control processes.

Ends on SIGTERM or SIGINT. Replicas go on without it and are taken over by the next one; a keeper
that has no replica left ends with it.
"""

import asyncio
import logging
import pwd
import signal
from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.cli.settings import Settings
from nagara.node.agent import AgentServer
from nagara.node.build import build_node

_log = logging.getLogger(__name__)


def agent_socket(state: Path) -> Path:
    """Where the agent of a state folder listens unless told otherwise."""
    return state / "agent.sock"


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
@click.pass_obj
def agent(settings: Settings, path: Path | None, allow_user: str | None) -> None:
    """Run this machine's node agent alone."""
    owner = _user_id(allow_user) if allow_user else None
    settings.state.mkdir(parents=True, exist_ok=True)
    asyncio.run(_serve(settings.state, path or agent_socket(settings.state), owner))


async def _serve(state: Path, path: Path, owner: int | None) -> None:
    node = build_node(state)
    await node.open()
    allowed = () if owner is None else (owner,)
    server = asyncio.ensure_future(AgentServer(node, path, allowed_uids=allowed, owner=owner).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.cancel)
    for gap in (await node.facts()).missing:
        _log.info("without %s", gap)
    try:
        await asyncio.wait([server])
        if not server.cancelled():
            server.result()
    finally:
        await node.close(stop_replicas=False)


def _user_id(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UsageError("there is no such user", where=f"--allow-user {name}") from None
