"""`nagara exec`: runs a command inside a replica of this machine.

It needs what the node agent has (root, or the agent's own user) and speaks to neither the agent
nor control: the container's own tool enters it. Standard streams and the exit code are the
command's.
"""

import os
import sys
from pathlib import Path

import click

from nagara.base.errors import NagaraError, UsageError
from nagara.cli.settings import Settings
from nagara.node.replica_folder import ReplicaFolder, replica_folders
from nagara.sandbox.runc import Runc
from nagara.sandbox.tools import find_tools


@click.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.argument("replica", metavar="REPLICA|APP")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-t", "--tty", is_flag=True, help="With a terminal, for a shell.")
@click.pass_obj
def exec_(settings: Settings, replica: str, command: tuple[str, ...], tty: bool) -> None:
    """Run a COMMAND inside a REPLICA of this machine, as its root.

    An APP's name stands for the newest of its replicas that is ready; `nagara trace APP --json`
    tells all of them. What the command changes in the replica's files is the replica's alone and
    gone with it; a replica that is saved later is another one.
    """
    folder = _folder(settings.state / "node" / "replicas", replica)
    if (folder.bundle / "config.json").exists():
        program = _in_container(settings.state, folder, command, tty=tty)
        environment = dict(os.environ)
    else:
        program, environment = _beside_process(folder, command)
    sys.stdout.flush()
    os.execvpe(program[0], program, environment)  # noqa: S606 - a program, no shell


def _folder(parent: Path, replica: str) -> ReplicaFolder:
    try:
        found = {folder.name: folder for folder in replica_folders(parent)}
    except PermissionError as error:
        raise NagaraError(
            "this user may not look at the replicas", where=str(parent),
            hint="run it as who runs the node agent, mostly root: sudo nagara exec ...",
        ) from error  # fmt: skip
    if replica in found:
        return found[replica]
    if of_app := [one for one in found.values() if _serves(one, replica)]:
        return max(of_app, key=lambda one: one.path.stat().st_ctime)
    known = ", ".join(found) or "none runs here"
    what = f"there is no replica {replica!r} on this machine, and none of such an app"
    raise UsageError(what, hint=f"there: {known}")


def _serves(folder: ReplicaFolder, app: str) -> bool:
    record = folder.read()
    return record is not None and record.app == app and record.ready and not record.is_capture


def _in_container(
    state: Path, folder: ReplicaFolder, command: tuple[str, ...], *, tty: bool
) -> list[str]:
    tools = find_tools(state / "tools")
    if tools.runc is None:
        raise NagaraError("runc is missing", hint="nagara setup runc")
    runc = Runc(tools.runc, None, state / "node" / "runc")
    return runc.exec_command(folder.name, command, tty=tty)


def _beside_process(
    folder: ReplicaFolder, command: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """A plain process has no inside but its environment and, with an image, its root."""
    try:
        pid = int(folder.pid_file.read_text().split()[0])
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        is_apart = Path(f"/proc/{pid}/root").resolve() != Path("/")
    except (OSError, ValueError, IndexError) as error:
        raise NagaraError("it is not running any more", where=folder.name) from error
    environment = {
        os.fsdecode(name): os.fsdecode(value)
        for name, mark, value in (pair.partition(b"=") for pair in pairs)
        if mark
    }
    enter = ["nsenter", "--target", str(pid), "--user", "--mount", "--root", "--wd", "--"]
    if is_apart:
        enter.insert(-1, "--preserve-credentials")
    return [*(enter if is_apart else []), *command], environment
