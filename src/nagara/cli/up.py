"""`nagara up`: everything on one machine. The only place where control meets a running node.

The node agent is a process of its own with the rights it needs; control, in this process, needs
none and gives them up (`--user`, or the user who called sudo). An agent that dies is
started again; replicas and their keeper go on meanwhile.
"""

import asyncio
import contextlib
import logging
import os
import pwd
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import click

from nagara.base.errors import NagaraError, UsageError
from nagara.base.linux import die_with_parent
from nagara.cli.agent import (
    agent_socket,
    certificates_option,
    disk_budget_option,
    dns_option,
)
from nagara.cli.reaching import agent_options, reached, wanted
from nagara.cli.settings import Settings
from nagara.cli.text_file import read_text_file
from nagara.contract.node import NodeUnavailableError
from nagara.contract.replica import ModelMount
from nagara.control.auth import TOKEN_FILE
from nagara.control.control import Control, Ready
from nagara.image.models import find_model
from nagara.node.mandate import Mandate
from nagara.node.remote_node import RemoteNode

_AGENT_START_S = 60.0
_AGENT_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes any.",
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="How many replicas this machine may run at once  [default: one a core, at least 4]",
)
@click.option(
    "--pool",
    "pool_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep machines ready as this pool file says, beside or instead of this one.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Use the machines of the Ray cluster there, too: auto, HOST:PORT, ray://HOST:PORT; head "
    "(or head:PORT) starts one on this machine that others can join.",
)
@click.option(
    "--auth",
    type=click.Choice(["keys", "off"]),
    default="keys",
    show_default=True,
    help="Whether callers of apps need an API key.",
)
@click.option(
    "--agent",
    "socket",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use the agent that listens there instead of starting one.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The secret shared with agents on other machines  "
    "[default: cluster-token in the state folder, made if it is not there]",
)
@certificates_option
@click.option(
    "--cache",
    metavar="HOST:PORT",
    help="Serve this machine's images, models and snapshots to the other machines there.",
)
@click.option(
    "--user",
    metavar="NAME",
    help="As root: run the control process as this user  [default: who called sudo]",
)
@click.option(
    "--database",
    metavar="URL",
    envvar="NAGARA_DATABASE",
    help="Keep the state in PostgreSQL (postgresql://...) instead of a file of the state folder.",
)
@click.option(
    "--otlp",
    metavar="URL",
    envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    help="Send traces to the OpenTelemetry collector there, as OTLP over HTTP.",
)
@dns_option
@click.option(
    "--callback-host",
    metavar="HOST",
    multiple=True,
    help="A host that queued requests may have called back, by name or pattern (*.example.com); "
    "may be repeated  [default: none]",
)
@disk_budget_option
@click.option("--keep-replicas", is_flag=True, help="Leave ready replicas running at the end.")
@click.option("--end-with-parent", is_flag=True, hidden=True)
@click.pass_obj
def up(
    settings: Settings,
    file: Path | None,
    host: str,
    port: int,
    slots: int | None,
    pool_file: Path | None,
    cluster: str | None,
    auth: str,
    socket: Path | None,
    token_file: Path | None,
    certificates: Path | None,
    cache: str | None,
    user: str | None,
    database: str | None,
    otlp: str | None,
    dns: tuple[str, ...],
    disk_budget: int | None,
    callback_host: tuple[str, ...],
    keep_replicas: bool,
    end_with_parent: bool,
) -> None:
    """Run the gateway and everything behind it on this machine.

    FILE is an app file to deploy at once.
    """
    if end_with_parent:
        die_with_parent(signal.SIGTERM)
    app_file = _read(file)
    wish = wanted(slots, pool_file, cluster, token_file, certificates)
    user = user or os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    settings.state.mkdir(parents=True, exist_ok=True)
    options = agent_options(wish, cache, socket, dns, disk_budget)

    async def run() -> None:
        mandate = Mandate()
        async with (
            _agent(settings.state, socket, user, options) as path,
            # Reads files, as who we still are.
            reached(settings.state, path, wish, mandate) as machines,
        ):
            if user:
                _become(user, settings.state)
            control = Control(
                *(settings.state, RemoteNode(path, mandate), machines.pool),
                nodes=machines.nodes, host=host, port=port, models=_finder(settings.models_dir),
                auth=auth, otlp=otlp, database=database, callback_hosts=callback_host,
            )  # fmt: skip
            mandate.epoch, mandate.on_refused = control.epoch, control.deposed
            _stop_on_signal(control, keep=keep_replicas, is_tied=end_with_parent)
            await control.run(partial(_announce, settings.state), app_file=app_file)

    asyncio.run(run())


def _read(file: Path | None) -> tuple[str, str] | None:
    if file is None:
        return None
    return read_text_file(file, hint="nagara init writes one to begin with"), str(file)


def _finder(models_dir: Path) -> Callable[[str], ModelMount]:
    def find(name: str) -> ModelMount:
        return ModelMount(name, find_model(models_dir, name).digest)

    return find


def _announce(state: Path, ready: Ready) -> None:
    click.echo(f"nagara serves at {ready.url}")
    click.echo(f"its page is there, too; the admin token: {state / TOKEN_FILE}")
    if ready.api_key:
        click.echo(f"API key: {ready.api_key}")


def _stop_on_signal(control: Control, *, keep: bool, is_tied: bool) -> None:
    """The first signal asks for an orderly end, a second one does not wait for it.

    A process tied to its parent is sent SIGTERM once for each of the parent's threads that ends:
    to it, more of them say nothing new.
    """
    loop = asyncio.get_running_loop()
    impatient = (signal.SIGINT,) if is_tied else (signal.SIGINT, signal.SIGTERM)
    is_ending = False

    def ask() -> None:
        nonlocal is_ending
        if is_ending:
            return
        is_ending = True
        _log.info("ending, once the replicas have ended; the same again ends at once")
        for number in impatient:
            loop.remove_signal_handler(number)
        control.stop(keep=keep)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)


@contextlib.asynccontextmanager
async def _agent(
    state: Path, given: Path | None, user: str | None, options: list[str]
) -> AsyncIterator[Path]:
    """The socket of a running agent: the one given, or one of our own that is kept alive."""
    if given is not None:
        await RemoteNode(given).facts()
        yield given
        return
    path = agent_socket(state)
    command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "agent"]
    command += ["--end-with-input", *(["--allow-user", user] if user else []), *options]
    first = await _start_agent(command)
    keeping = asyncio.create_task(_keep_alive(command, first), name="keep the agent alive")
    try:
        await _until_serving(path, first)
        yield path
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _start_agent(command: list[str]) -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C is for this process, which still needs the agent to end.
    return await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )


async def _until_serving(path: Path, agent: asyncio.subprocess.Process) -> None:
    deadline_s = asyncio.get_running_loop().time() + _AGENT_START_S
    while agent.returncode is None:
        try:
            await RemoteNode(path).facts()
        except NodeUnavailableError:
            if asyncio.get_running_loop().time() > deadline_s:
                raise
            await asyncio.sleep(0.02)
        else:
            return
    raise NagaraError("the node agent did not start", hint="its message is above")


async def _keep_alive(command: list[str], agent: asyncio.subprocess.Process) -> None:
    """Starts the agent again whenever it ends; ends it when cancelled.

    When control has given up root in between, the new agent could not do its work: then its end
    is final, and control reports the machine as unreachable.
    """
    started_as = os.geteuid()
    try:
        while True:
            code = await agent.wait()
            _log.error("the node agent ended with %d", code)
            if os.geteuid() != started_as:
                return
            await asyncio.sleep(_AGENT_PAUSE_S)
            agent = await _start_agent(command)
    finally:
        # Not by a signal: without root none may be sent. It ends with its input.
        if agent.stdin is not None:
            agent.stdin.close()
        await agent.wait()


def _become(user: str, state: Path) -> None:
    """Gives up root for a user, who gets the state folder; the node's parts of it stay root's."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise UsageError("there is no such user", where=f"--user {user}") from None
    os.chown(state, entry.pw_uid, entry.pw_gid)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
