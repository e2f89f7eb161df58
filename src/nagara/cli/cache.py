"""`nagara cache`: serves this machine's objects to its zone."""

import signal
import threading
from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.cli.opened_store import opened_folder
from nagara.cli.settings import Settings
from nagara.store.budget import ByteBudget
from nagara.store.cache_server import CacheServer
from nagara.store.configured import open_store, read_settings
from nagara.store.tokens import Tokens, read_tokens

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.group()
def cache() -> None:
    """Serve objects to other machines."""


@cache.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=7070, show_default=True, help="0 takes a free one.")
@click.option(
    "--tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    help='JSON, mode 0600: {"TOKEN": {"tenant": "default", "write": true}}. '
    "Without it everybody may do everything, and only loopback is served.",
)
@click.pass_obj
def serve(settings: Settings, host: str, port: int, tokens: Path | None) -> None:
    """Serve this machine's object folder over HTTP, and what the tiers behind it have.

    The folder's bound and the tiers are set in STATE/store/settings.json.
    """
    if tokens is None and host not in _LOOPBACK:
        raise UsageError(
            f"{host} can be reached by others: --tokens is needed",
            hint="write a token file, or listen at 127.0.0.1",
        )
    known = read_tokens(tokens) if tokens is not None else Tokens(None)
    with opened_folder(settings) as folder:
        budget = ByteBudget(read_settings(folder.path).budget_bytes)
        server = CacheServer(
            folder,
            lambda tenant: open_store(folder, tenant, budget, with_zone=False),
            known,
            (host, port),
        )
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        thread = threading.Thread(target=server.run, name="serve")
        thread.start()
        click.echo(f"serving {folder.path} at http://{host}:{server.port}")
        stop.wait()
        server.close()
        thread.join()
