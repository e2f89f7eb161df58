"""`nagara version`: what is installed. Reads no state."""

import click

from nagara import __version__
from nagara.cli.output import json_option, tell


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version."""
    tell({"nagara": __version__}, f"nagara {__version__}", as_json=as_json)
