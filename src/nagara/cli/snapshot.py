"""`nagara snapshot`: what is saved on this machine, and why an app has no snapshot.

Snapshots are read from the store (root only); the reasons come from the running nagara.
"""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import UsageError
from nagara.base.units import format_bytes
from nagara.cli.opened_store import opened_catalog
from nagara.cli.settings import Settings
from nagara.cli.snapshot_moving import COMMANDS, json_option
from nagara.control.client import connect
from nagara.control.errors import ControlError
from nagara.snapshot import hooks as hook_module
from nagara.snapshot.catalog import Catalog, Snapshot
from nagara.snapshot.condition import Condition, conditions

_STATES = {"unknown": "not yet", "wanted": "waiting", "running": "being made"}


@click.group()
def snapshot() -> None:
    """Show, verify, move and remove saved replicas."""


for _command in COMMANDS:
    snapshot.add_command(_command)


@snapshot.command(epilog="Example: nagara snapshot ls --json | jq '.snapshots[].state'")
@json_option
@click.pass_obj
def ls(settings: Settings, as_json: bool) -> None:
    """List the snapshots of this machine and the apps that have none."""
    rows = _saved(settings)
    rows += _unsaved(settings.state, {row["app"] for row in rows if row["state"] == "good"})
    if as_json:
        click.echo(json.dumps({"snapshots": rows}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("app", "snapshot", "state", "size", "made"):
        table.add_column(column)
    for row in rows:
        size, made = (row.get("size_bytes"), row.get("created_at_s"))
        table.add_row(
            row["app"],
            row.get("snapshot") or "",
            row["state"],
            format_bytes(size) if size else "",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(made)) if made else "",
        )
    Console(highlight=False).print(table)
    for row in rows:
        for reason in row["reasons"]:
            click.echo(f"{row['app']}: {reason}")


@snapshot.command(epilog="Example: nagara snapshot show smol")
@click.argument("name", metavar="APP|SNAPSHOT")
@click.option("--json", is_flag=True, expose_value=False, help="It is JSON in any case.")
@click.pass_obj
def show(settings: Settings, name: str) -> None:
    """Print everything known of an app's snapshots, or of one, as JSON."""
    rows = _saved(settings, with_needs=True) + _unsaved(settings.state, set())
    chosen = [row for row in rows if name in (row["app"], row.get("snapshot"))]
    if not chosen:
        raise UsageError(f"no app and no snapshot is called {name!r}", hint="nagara snapshot ls")
    click.echo(json.dumps(chosen, indent=2))


@snapshot.command()
def hooks() -> None:
    """Print the Python module that a server without nagara imports for its snapshot hooks."""
    click.echo(Path(hook_module.__file__).read_text(), nl=False)


def _saved(settings: Settings, *, with_needs: bool = False) -> list[dict[str, Any]]:
    """The published snapshots of this machine."""
    with opened_catalog(settings) as catalog:
        return [_row(catalog, one, with_needs) for one in conditions(catalog)]


def _row(catalog: Catalog, condition: Condition, with_needs: bool) -> dict[str, Any]:
    """What is told of one snapshot."""
    listed = condition.listed
    row: dict[str, Any] = {"app": listed.app, "tenant": listed.tenant, "snapshot": listed.name}
    row |= {"state": condition.state.value, "reasons": list(condition.reasons)}
    if (snapshot := listed.snapshot) is None:
        return row
    record = snapshot.record
    row |= {
        "here_bytes": condition.here_bytes,
        "size_bytes": record.memory_bytes + record.layer_bytes,
        "created_at_s": record.created_at_s,
    }
    if with_needs:
        row |= {
            "stored_bytes": condition.share.stored_bytes,
            "shared_bytes": condition.share.shared_bytes,
            "memory_bytes": record.memory_bytes,
            "layer_bytes": record.layer_bytes,
            "key": record.key,
            "canary_answer": record.canary_answer,
            "machine_files": len(record.host_files),
            "sealed": record.sealed_by is not None,
            "reach": "wide" if record.variant.is_levelled else "same",
            "cpu_flags": sorted(record.variant.cpu_flags),
            "image": str(snapshot.image.index),
            "objects": _objects(catalog, snapshot),
        }
    return row


def _objects(catalog: Catalog, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Its objects, and which of them are on this machine."""
    shelf = catalog.shelf(snapshot.tenant)
    if not shelf.local.has(snapshot.image.index):
        return []
    return [
        {"object": str(name), "path": path, "is_here": shelf.local.has(name)}
        for name, path in sorted(shelf.paths(snapshot.image).items(), key=lambda pair: pair[1])
    ]


def _unsaved(state: Path, saved: set[str]) -> list[dict[str, Any]]:
    """Apps of the running nagara, if there is one, that have no good snapshot."""
    try:
        apps = connect(state).apps()
    except ControlError:  # not running: what is on the disk is all there is to tell
        return []
    rows = []
    for app in apps:
        capture = app["capture"]
        if app["name"] in saved or capture["state"] == "done":
            continue
        reason = capture.get("reason")
        failed = f"none, {capture['failures']} failures" if capture["failures"] else "none"
        rows.append(
            {
                "app": app["name"],
                "state": _STATES.get(capture["state"], failed),
                "reasons": [f"no snapshot: {reason}"] if reason else [],
            }
        )
    return rows
