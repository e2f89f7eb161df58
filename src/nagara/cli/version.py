"""`nagara version`: what is installed. Reads no state."""

import click

from nagara import __version__


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"nagara {__version__}")
