"""`nagara doctor`: what this machine has, and what nagara owns on it.

It examines the machine itself, so it reaches into the node, as the agent does; no running nagara
is needed or disturbed. Data goes to standard output.
"""

import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nagara import __version__
from nagara.base.errors import UsageError
from nagara.cli.instance import INSTANCE_LOCK, instance_folders
from nagara.cli.settings import Settings
from nagara.control.client import CONTROL_FILE
from nagara.node.clearing import clear, remove_folder
from nagara.node.doctor import Examination, Finding, Status, examine
from nagara.node.leaks import Holding, holdings
from nagara.sandbox.lock_holders import is_locked

_COLOURS = {Status.WORKS: "green", Status.LACKING: "yellow", Status.UNTRIED: "dim"}

_console = Console(highlight=False)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option("--leaks", is_flag=True, help="List what nagara owns on this machine instead.")
@click.option(
    "--clear", "clearing", is_flag=True, help="With --leaks: clear away what is orphaned."
)
@click.pass_obj
def doctor(settings: Settings, as_json: bool, leaks: bool, clearing: bool) -> None:
    """Try out what this machine can do, or list what nagara owns on it.

    The trials are real: mounts, namespaces, a process saved and put back. They take a few
    seconds and leave nothing. Whatever they find, the exit code is 0.

    With --leaks: containers, mounts, control groups, sockets, processes and temporary folders
    of this state folder. The exit code is 1 if nobody answers for one of them.
    """
    if clearing and not leaks:
        raise UsageError("--clear belongs to --leaks")
    if leaks:
        _leaks(settings.state, as_json=as_json, clearing=clearing)
        return
    examination = examine(settings.state)
    if as_json:
        click.echo(json.dumps(_document(examination), indent=2))
    else:
        _show(examination)


def _document(examination: Examination) -> dict[str, Any]:
    return {
        "nagara": __version__,
        "machine": {
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "containers": examination.has_containers,
        "snapshots": examination.has_snapshots,
        "capabilities": [
            {
                "name": finding.capability.name,
                "status": finding.status.value,
                "detail": finding.detail,
                "purpose": finding.capability.purpose,
                "without": finding.capability.without,
                "get": finding.capability.get,
            }
            for finding in examination.findings
        ],
    }


def _show(examination: Examination) -> None:
    cores = len(os.sched_getaffinity(0))
    _console.print(
        f"nagara {__version__} on Linux {platform.release()}, {platform.machine()}, {cores} cores\n"
        f"replicas run as {'containers' if examination.has_containers else 'plain processes'} "
        f"here and {'can' if examination.has_snapshots else 'cannot'} be saved\n"
    )
    table = _table("capability", "", "found", "what it is for")
    for finding in examination.findings:
        colour = _COLOURS[finding.status]
        table.add_row(
            finding.capability.name,
            f"[{colour}]{finding.status.value}[/]",
            escape(finding.detail),
            finding.capability.purpose,
        )
    _console.print(table)
    if gaps := [f for f in examination.findings if f.status is Status.LACKING]:
        _console.print()
        _console.print(_remedies(gaps))


def _remedies(gaps: Sequence[Finding]) -> Table:
    table = _table("lacking", "what nagara does without", "how to get it")
    for finding in gaps:
        capability = finding.capability
        table.add_row(capability.name, capability.without, escape(capability.get))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class _Found:
    """One owned thing as it is shown. `answered_by` None: orphaned."""

    kind: str
    name: str
    answered_by: str | None


def _leaks(state: Path, *, as_json: bool, clearing: bool) -> None:
    if clearing:
        _clear(state)
    found = _owned(state)
    orphaned = [thing for thing in found if thing.answered_by is None]
    if as_json:
        document = {
            "state": str(state),
            "orphaned": len(orphaned),
            "owned": [asdict(thing) for thing in found],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _show_owned(found)
        if orphaned:
            click.echo(
                f"{len(orphaned)} orphaned. hint: the next `nagara up` clears what belongs to "
                "replicas; `nagara doctor --leaks --clear` clears all of it",
                err=True,
            )
    if orphaned:
        sys.exit(1)


def _show_owned(found: Sequence[_Found]) -> None:
    if not found:
        click.echo("nothing of nagara's is on this machine besides its state", err=True)
        return
    table = _table("what", "name", "who answers for it")
    for thing in found:
        who = escape(thing.answered_by) if thing.answered_by else "[yellow]nobody: orphaned[/]"
        table.add_row(thing.kind, escape(thing.name), who)
    _console.print(table)


def _owned(state: Path) -> list[_Found]:
    """Everything of this state folder and of the demonstrations' and measurements' below it."""
    found = _of_its_own(state)
    if (control := _announced(state)) is not None:
        found.append(control)
    for folder in instance_folders(state):
        owner = "the command that made it" if is_locked(folder / INSTANCE_LOCK) else None
        found.append(_Found("temporary folder", str(folder), owner))
        found += _shown(asyncio.run(holdings(folder)))
    return found


def _of_its_own(state: Path) -> list[_Found]:
    """What belongs to this state folder and not to an instance's below it."""
    instances = [str(folder.resolve()) for folder in instance_folders(state)]
    found = _shown(asyncio.run(holdings(state)))
    return [one for one in found if not any(one.name.startswith(f"{i}/") for i in instances)]


def _shown(found: Sequence[Holding]) -> list[_Found]:
    return [_Found(one.owned.kind, one.owned.name, one.answered_by) for one in found]


def _announced(state: Path) -> _Found | None:
    """The file by which other commands find the control process."""
    file = state / CONTROL_FILE
    if not file.exists():
        return None
    is_alive = is_locked(state / "control.lock")
    owner = "the control process" if is_alive else None
    return _Found("control file", str(file), owner)


def _clear(state: Path) -> None:
    if any(thing.answered_by is None for thing in _of_its_own(state)):
        asyncio.run(clear(state, keep_replicas=True))
    if (control := _announced(state)) is not None and control.answered_by is None:
        Path(control.name).unlink()
    for folder in instance_folders(state):
        if not is_locked(folder / INSTANCE_LOCK):
            asyncio.run(clear(folder, keep_replicas=False))
            remove_folder(folder)
