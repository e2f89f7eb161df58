"""`nagara logs`: what an app's replica wrote to its standard output and error."""

import sys
import time

import click

from nagara.cli.completion import complete_app
from nagara.cli.settings import Settings
from nagara.control.client import ControlClient, connect

_POLL_S = 0.5
_FOLLOW_BYTES = 2**20
_OVERLAP_BYTES = 4096


@click.command()
@click.argument("app", shell_complete=complete_app)
@click.option("--replica", help="Of this replica  [default: the newest that has a log]")
@click.option("-n", "--bytes", "tail_bytes", type=click.IntRange(1, 2**24), default=65536,
              show_default=True, help="At most so many bytes from the end.")  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written until Ctrl-C.")
@click.pass_obj
def logs(settings: Settings, app: str, replica: str | None, tail_bytes: int, follow: bool) -> None:
    """Print what an APP's replicas wrote."""
    client = connect(settings.state)
    name, text = client.logs(app, replica=replica, tail_bytes=tail_bytes)
    click.echo(f"log of {name}:", err=True)
    _write(text)
    while follow:
        time.sleep(_POLL_S)
        name, text = _go_on(client, app, replica, name, text)


def _go_on(
    client: ControlClient, app: str, replica: str | None, name: str, before: bytes
) -> tuple[str, bytes]:
    """Prints what is new since `before`; a newer replica's log begins anew."""
    newest, text = client.logs(app, replica=replica, tail_bytes=_FOLLOW_BYTES)
    if newest != name:
        click.echo(f"log of {newest}:", err=True)
        before = b""
    _write(news(before, text))
    return newest, text or before


def news(before: bytes, after: bytes) -> bytes:
    """What `after` has beyond `before`, both being ends of one growing text."""
    if not before:
        return after
    known = before[-_OVERLAP_BYTES:]
    position = after.rfind(known)
    return after if position < 0 else after[position + len(known) :]


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
