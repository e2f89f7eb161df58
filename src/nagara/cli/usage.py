"""`nagara usage`: what reserved slots were used for, by app, and what is kept on the disk."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.base.units import format_bytes
from nagara.cli.settings import Settings
from nagara.control.client import connect


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def usage(settings: Settings, as_json: bool) -> None:
    """Show for each app how much of its reserved time had work in it, and what the rest was.

    Below it: what this machine keeps on its disk, by part, and what went to keep to its budget.
    """
    client = connect(settings.state)
    document = {**client.usage(), "disk": client.disk()}
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    uses = list(document["all"]["seconds"])
    for column in ("app", "utilisation", *uses):
        table.add_column(column, justify="left" if column == "app" else "right")
    for name, one in (*document["apps"].items(), ("all", document["all"])):
        table.add_row(name, _share(one), *(f"{one['seconds'][use]:.0f} s" for use in uses))
    console = Console(highlight=False)
    console.print(table)
    console.print(_disk(document["disk"]))


def _disk(disk: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in disk["parts"].items())
    bound = disk["limit_bytes"]
    whole = format_bytes(sum(disk["parts"].values()))
    of = "no budget" if bound is None else f"of {format_bytes(bound)}"
    gone = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in disk["removed"].items())
    return f"disk: {whole}, {of} ({parts})" + (f"; removed: {gone}" if gone else "")


def _share(one: dict[str, Any]) -> str:
    share = one["allocation_utilisation"]
    return "-" if share is None else f"{100 * share:.1f} %"
