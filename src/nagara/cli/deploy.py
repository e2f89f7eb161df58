"""`nagara deploy`: adds or replaces the apps of an app file in the running nagara."""

from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.cli.settings import Settings
from nagara.control.client import connect


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def deploy(settings: Settings, file: Path) -> None:
    """Add or replace the apps of an app FILE (TOML).

    All apps of the file are checked first; if one is wrong, nothing changes.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file)) from error
    client = connect(settings.state)
    for app in client.deploy(text, str(file)):
        click.echo(f"{app['name']} version {app['version']}: {client.url}/{app['name']}/")
        capture = app["capture"]
        if capture["state"] == "off" and capture.get("reason"):
            click.echo(f"{app['name']}: every start is a plain one: {capture['reason']}", err=True)
