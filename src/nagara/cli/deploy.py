"""`nagara deploy`: adds or replaces the apps of an app file in the running nagara."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from nagara.base.errors import NagaraError
from nagara.cli.output import json_option, tell
from nagara.cli.settings import Settings
from nagara.cli.text_file import read_text_file
from nagara.control.client import ControlClient, connect

_POLL_S = 1.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
@click.pass_obj
def deploy(settings: Settings, file: Path, as_json: bool) -> None:
    """Add or replace the apps of an app FILE (TOML).

    All apps of the file are checked first; if one is wrong, nothing changes. Images are brought
    into the store meanwhile: how far that is, is shown on standard error.
    """
    text = read_text_file(file, hint="nagara init writes one to begin with")
    client = connect(settings.state)
    with imports_shown(client):
        apps = client.deploy(text, str(file))
    lines = [f"{app['name']} version {app['version']}: {client.url}/{app['name']}/" for app in apps]
    tell({"apps": apps}, *lines, as_json=as_json)


@contextmanager
def imports_shown(client: ControlClient) -> Iterator[None]:
    """Meanwhile tells about the images that are on their way."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_POLL_S):
            try:
                lines = client.status()["bringing"]
            except NagaraError:
                return  # the deployment itself will say what is wrong
            for line in lines:
                click.echo(line, err=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
