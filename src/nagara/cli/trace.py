"""`nagara trace`: where the time of starts went."""

import json
from typing import Any

import click
from rich.console import Console

from nagara.cli.completion import complete_app
from nagara.cli.settings import Settings
from nagara.cli.waterfall import waterfall
from nagara.control.client import connect


@click.command()
@click.argument("name", metavar="APP|REPLICA", shell_complete=complete_app)
@click.option("--all", "show_all", is_flag=True, help="Every recorded start, not one of a kind.")
@click.option("--json", "as_json", is_flag=True, help="Print the API's document.")
@click.pass_obj
def trace(settings: Settings, name: str, show_all: bool, as_json: bool) -> None:
    """Show where the time of a start went.

    Of an app: its latest start of each kind (plain, restored, failed) side by side. Of a
    replica: its own start.
    """
    document = connect(settings.state).trace(name)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    starts = document["starts"]
    if not starts:
        click.echo(f"no start of {name} has ended yet; see: nagara apps", err=True)
        return
    chosen = list(reversed(starts)) if show_all else latest_of_each_kind(starts)
    Console(highlight=False).print(waterfall(chosen))


def latest_of_each_kind(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From starts with the newest first: one of each kind, plain ones before restored ones."""
    latest: dict[str, dict[str, Any]] = {}
    for start in starts:
        latest.setdefault(start["kind"] or "failed", start)
    return [latest[kind] for kind in ("plain", "restored", "failed") if kind in latest]
