"""`nagara setup`: gets the tools that containers and snapshots need. Each command may be repeated.

Called by hand or by a Makefile; needs root for what touches the system.
"""

import os
from pathlib import Path

import click

from nagara.cli.settings import Settings
from nagara.sandbox.criu_folder import install_criu_from, install_criu_with_apt
from nagara.sandbox.tools import ToolError, check_criu, find_tools, install_runc


@click.group()
def setup() -> None:
    """Get the tools that containers and snapshots need."""


@setup.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take CRIU from this folder (.deb files, or their unpacked tree) instead of a mirror.",
)
@click.pass_obj
def criu(settings: Settings, source: Path | None) -> None:
    """Make CRIU >= 4.2 available: the system's if it is new enough, else one of nagara's own.

    The own one consists of unpacked Debian packages below the state folder, fetched and verified
    by apt; nothing of the system is changed.
    """
    if source is not None:
        install_criu_from(settings.tools_dir, source)
    elif find_tools(settings.tools_dir).criu is None:
        install_criu_with_apt(settings.tools_dir)
    tools = find_tools(settings.tools_dir)
    if tools.criu is None:
        raise ToolError("CRIU is still missing: " + "; ".join(tools.missing))
    if os.geteuid() == 0:
        check_criu(tools.criu)
        click.echo(f"criu {tools.criu_version} at {tools.criu}, works on this kernel")
    else:
        click.echo(f"criu {tools.criu_version} at {tools.criu}, not checked: that needs root")


@setup.command()
@click.pass_obj
def runc(settings: Settings) -> None:
    """Make runc available: the system's, installed with apt where it is missing."""
    if find_tools(settings.tools_dir).runc is None:
        install_runc()
    tools = find_tools(settings.tools_dir)
    if tools.runc is None:
        raise ToolError("runc is still missing: " + "; ".join(tools.missing))
    click.echo(f"runc {tools.runc_version} at {tools.runc}")
