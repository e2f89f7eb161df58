"""`nagara delete`: removes an app with everything kept of it."""

import click

from nagara.cli.settings import Settings
from nagara.control.client import connect


@click.command()
@click.argument("app")
@click.pass_obj
def delete(settings: Settings, app: str) -> None:
    """Remove an APP with its snapshots, logs and history.

    Running requests may end first.
    """
    connect(settings.state).delete(app)
    click.echo(f"{app} is deleted")
