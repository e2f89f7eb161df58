"""`nagara delete`: removes an app with everything kept of it."""

import click

from nagara.cli.completion import complete_app
from nagara.cli.output import json_option, tell
from nagara.cli.settings import Settings
from nagara.control.client import connect


@click.command()
@click.argument("app", shell_complete=complete_app)
@json_option
@click.pass_obj
def delete(settings: Settings, app: str, as_json: bool) -> None:
    """Remove an APP with its snapshots, logs and history.

    Running requests may end first.
    """
    connect(settings.state).delete(app)
    tell({"deleted": app}, f"{app} is deleted", as_json=as_json)
