"""`nagara top`: apps, rates and starts as they change, told by server-sent events."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nagara.cli.output import json_option, printable, tell
from nagara.cli.settings import Settings
from nagara.control.client import connect

_ROWS_BESIDE = 6  # lines of the terminal that are not an app's
_PLAIN_ROWS = 50


class World:
    """What is known of everything, from the events so far."""

    def __init__(self) -> None:
        self.apps: dict[str, dict[str, Any]] = {}
        self.pool: dict[str, Any] = {}
        self.sample: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []

    def take(self, name: str, document: Any) -> None:
        """One more event."""
        if name == "hello":
            self.apps = {app["name"]: app for app in document["apps"]}
            self.pool, self.starts = document["pool"], document["starts"]
            self.sample = (document["samples"] or [{}])[-1]
        elif name == "apps":
            self.apps |= {app["name"]: app for app in document["changed"]}
            for gone in document["gone"]:
                self.apps.pop(gone, None)
        elif name == "starts":
            self.starts = [*reversed(document), *self.starts][:100]
        elif name == "pool":
            self.pool = document
        elif name == "sample":
            self.sample = document

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"apps": list(self.apps.values()), "sample": self.sample, "pool": self.pool}


@click.command()
@click.option("--once", is_flag=True, help="Print it once and end, as where no terminal is.")
@json_option
@click.pass_obj
def top(settings: Settings, once: bool, as_json: bool) -> None:
    """Watch apps, their rates and their starts as they change, until Ctrl-C."""
    console = Console(highlight=False)
    events = connect(settings.state).events()
    world = World()
    world.take(*next(events))
    if as_json or once or not console.is_terminal:
        if as_json:
            tell(world.document(), as_json=True)
        else:
            console.print(shown(world, _PLAIN_ROWS))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for rows in _rows(console, world, events):
            live.update(shown(world, rows), refresh=True)


def _rows(console: Console, world: World, events: Iterator[tuple[str, Any]]) -> Iterator[int]:
    """How many apps fit, after each event."""
    yield max(3, console.height - _ROWS_BESIDE)
    for name, document in events:
        world.take(name, document)
        if name == "sample":  # the last of a second
            yield max(3, console.height - _ROWS_BESIDE)


def shown(world: World, rows: int) -> RenderableType:
    """The table of apps, those with work first, below the figures of all."""
    apps = sorted(world.apps.values(), key=_order)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("app", no_wrap=True, min_width=12)
    for column in ("ready", "starting", "running", "queue", "req/s", "tok/s", "last start"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("remark", no_wrap=True, overflow="ellipsis")
    latest: dict[str, Mapping[str, Any]] = {}
    for start in world.starts:
        latest.setdefault(start["app"], start)
    for app in apps[:rows]:
        table.add_row(
            Text(app["name"]),
            str(app["ready"]),
            str(app["starting"]),
            str(app["running"]),
            str(app["held"]),
            f"{app['requests_s']:g}",
            f"{app['tokens_s']:g}",
            _start(latest.get(app["name"])),
            Text(_remark(app), style="red"),
        )
    left = len(apps) - rows
    more = [Text(f"and {left} more apps", style="dim")] if left > 0 else []
    return Group(Text(_figures(world)), Text(), table, *more)


def _figures(world: World) -> str:
    sample, pool = world.sample, world.pool
    return (
        f"{len(world.apps)} apps · {sample.get('ready', 0)} replicas ready, "
        f"{sample.get('starting', 0)} starting · {sample.get('requests', 0):g} requests/s, "
        f"{sample.get('tokens', 0):g} tokens/s · {sample.get('held', 0)} in queues · "
        f"pool: {pool['level']} free of {pool['level'] + pool['leased']}, "
        f"{len(pool['machines'])} machines"
    )


def _start(start: Mapping[str, Any] | None) -> str:
    return "" if start is None else f"{start['kind'] or 'failed'} {start['total_s']:.2f} s"


def _remark(app: Mapping[str, Any]) -> str:
    """In one line; escape codes of others are shown, not obeyed."""
    said = app["last_failure"] if app["failures"] else ""
    return printable(" ".join((said or "").split()))


def _order(app: Mapping[str, Any]) -> tuple[int, str]:
    is_busy = app["held"] or app["running"] or app["starting"]
    return (0 if is_busy else 1 if app["failures"] else 2 if app["ready"] else 3, app["name"])
