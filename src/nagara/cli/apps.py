"""`nagara apps`: what is deployed and how it is."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.cli.output import printable
from nagara.cli.settings import Settings
from nagara.control.client import connect

_REMARK_CHARS = 300


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the API's document.")
@click.pass_obj
def apps(settings: Settings, as_json: bool) -> None:
    """List the apps, how many replicas each has, and what is wrong."""
    found = connect(settings.state).apps()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo("nothing is deployed; deploy an app file with: nagara deploy FILE", err=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("app", "version", "replicas", "running", "held", "snapshot"):
        table.add_column(column)
    for app in found:
        table.add_row(
            app["name"],
            str(app["version"]),
            _replicas(app),
            str(app["running"]),
            str(app["held"]),
            _capture(app["capture"]),
        )
    Console(highlight=False).print(table)
    for app in found:
        if remark := _remark(app):
            click.echo(f"{app['name']}: {printable(remark)}")


def _replicas(app: dict[str, Any]) -> str:
    """`2 ready, 1 starting of 4`; `at zero` if there are none."""
    counts = [f"{count} {state}" for state, count in app["replicas"].items() if count]
    old = f", {app['outdated']} of an earlier version" if app.get("outdated") else ""
    return f"{', '.join(counts) or 'at zero'} (max {app['scale']['max']}){old}"


def _capture(capture: dict[str, Any]) -> str:
    names = {"unknown": "not yet", "wanted": "waiting", "running": "being made", "done": "made"}
    state: str = capture["state"]
    return names.get(state, state)


def _remark(app: dict[str, Any]) -> str:
    """What is wrong with the app, if anything."""
    if app["failures"]:
        reason = " ".join((app["last_failure"] or "").split())
        return f"{app['failures']} failures in a row: {reason[:_REMARK_CHARS]}"
    if app["capture"]["state"] in ("failed", "off") and app["capture"].get("reason"):
        return f"no snapshot: {app['capture']['reason'][:_REMARK_CHARS]}"
    return ""
