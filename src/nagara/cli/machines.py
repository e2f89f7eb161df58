"""`nagara machines`: where replicas may run, and how the machines do."""

import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.cli.output import json_option, printable, tell
from nagara.cli.settings import Settings
from nagara.control.client import connect

_WIDE = 240
_COLUMNS = ("machine", "address", "state", "slots", "heard", "version", "health")


@click.command()
@json_option
@click.pass_obj
def machines(settings: Settings, as_json: bool) -> None:
    """List the machines: address, state, slots, when each was last heard of, and its health.

    The slots are those leased of all there are. `nagara pool` steers them.
    """
    found = connect(settings.state).pool()["machines"]
    if as_json:
        tell(found, as_json=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=column != "health", overflow="fold")
    for machine in found:
        table.add_row(*map(printable, _row(machine)))
    # Where no terminal is, lines are for programs: addresses stay in one piece.
    width = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=width).print(table)
    for machine in found:
        for lease in machine["leases"]:
            click.echo(f"{lease['slot']}: {printable(lease['app'])} (epoch {lease['epoch']})")


def _row(machine: dict[str, Any]) -> tuple[str, ...]:
    return (
        machine["name"],
        machine["address"] or "here",
        machine["state"],
        f"{machine['leased']}/{machine['devices']}",
        _ago(machine["heard_ago_s"]),
        machine["version"] or "?",
        _health(machine),
    )


def _ago(seconds: float | None) -> str:
    return "not yet" if seconds is None else f"{seconds:.0f} s ago"


def _health(machine: dict[str, Any]) -> str:
    """What is wrong, or how the last checks ended."""
    faults = [machine["reason"]] if machine["reason"] else []
    faults += machine["kept_out"]
    if machine["is_silent"]:
        faults.append("does not answer")
    checks = machine["checks"]
    if checks is not None:
        failed = [one for one in checks["results"] if one["outcome"] == "fail"]
        faults += [f"{one['name']}: {one['detail']}" for one in failed]
        if not faults:
            return f"{checks['kind']} checks passed"
    return "; ".join(dict.fromkeys(faults)) or "not checked"
