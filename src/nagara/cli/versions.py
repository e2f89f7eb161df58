"""`nagara versions` and `nagara rollback`: what was deployed before, and back to it."""

import json
from datetime import UTC, datetime

import click
from rich.console import Console
from rich.table import Table

from nagara.cli.output import json_option, tell
from nagara.cli.settings import Settings
from nagara.control.client import connect


@click.command()
@click.argument("app")
@click.option("--json", "as_json", is_flag=True, help="Print the API's document.")
@click.pass_obj
def versions(settings: Settings, app: str, as_json: bool) -> None:
    """List the versions of an APP, newest first."""
    found = connect(settings.state).versions(app)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("version", "deployed", "definition", ""):
        table.add_column(column)
    for one in found:
        at = datetime.fromtimestamp(one["deployed_s"], UTC)
        mark = "in use" if one["is_present"] else ""
        row = (str(one["version"]), f"{at:%Y-%m-%d %H:%M:%S} UTC", one["definition"][:12], mark)
        table.add_row(*row)
    Console(highlight=False).print(table)


@click.command()
@click.argument("app")
@click.option(
    "--to", type=click.IntRange(min=1), metavar="VERSION",
    help="The version to take into use  [default: the one before the present one].",
)  # fmt: skip
@json_option
@click.pass_obj
def rollback(settings: Settings, app: str, to: int | None, as_json: bool) -> None:
    """Take an earlier version of an APP into use again, with its snapshot if it has one."""
    document = connect(settings.state).rollback(app, to)
    tell(document, f"{app} is at version {document['version']}", as_json=as_json)
