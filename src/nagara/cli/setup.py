"""`nagara setup`: gets the tools that containers and snapshots need. Each command may be repeated.

Called by hand or by a Makefile; needs root for what touches the system.
"""

import logging
import os
import shutil
from pathlib import Path

import click

from nagara.base.errors import NagaraError
from nagara.cli.settings import Settings
from nagara.engine.errors import UnsupportedError
from nagara.engine.kernels.build import compile_all
from nagara.sandbox.criu_folder import install_criu_from, install_criu_with_apt
from nagara.sandbox.scratch import scratch_folder
from nagara.sandbox.tools import (
    ToolError,
    Tools,
    accept_criu,
    check_criu,
    find_tools,
    install_package,
    own_criu,
    refuse_criu,
)
from nagara.snapshot.self_test import SelfTestError, self_test

_log = logging.getLogger(__name__)


@click.group(invoke_without_command=True)
@click.pass_context
def setup(ctx: click.Context) -> None:
    """Get the tools that containers and snapshots need, and the engine's kernel.

    Without a sub-command: all of them.
    """
    if ctx.invoked_subcommand is not None:
        return
    failed = []
    for command in (kernel, runc, erofs, criu):  # criu last: it is tried out with runc
        try:
            ctx.invoke(command)
        except NagaraError as error:
            click.echo(f"error: {error}", err=True)
            failed.append(str(command.name))
    if failed:
        raise NagaraError(f"not set up: {', '.join(failed)}")


@setup.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take CRIU from this folder (.deb files, or their unpacked tree) instead of a mirror.",
)
@click.pass_obj
def criu(settings: Settings, source: Path | None = None) -> None:
    """Make CRIU >= 4.2 available: the system's if it works, else one of nagara's own.

    As root it is tried out: a small server is saved and put back. The own one consists of
    unpacked Debian packages below the state folder, fetched and verified by apt; nothing of the
    system is changed. Tried with 4.2 to 4.x; newer ones are used with a warning.
    """
    if source is not None:
        install_criu_from(settings.tools_dir, source)
    elif find_tools(settings.tools_dir).criu is None:
        install_criu_with_apt(settings.tools_dir)
    tools = find_tools(settings.tools_dir)
    try:
        said = _tried(settings, tools)
    except (SelfTestError, ToolError) as error:
        if tools.criu is None or tools.criu == own_criu(settings.tools_dir):
            raise
        _log.warning("the system's CRIU is passed over: %s", error)
        refuse_criu(settings.tools_dir, tools.criu)
        tools = find_tools(settings.tools_dir)
        if tools.criu is None:
            install_criu_with_apt(settings.tools_dir)
            tools = find_tools(settings.tools_dir)
        said = _tried(settings, tools)
    else:
        if tools.criu != own_criu(settings.tools_dir):
            accept_criu(settings.tools_dir)
    for doubt in tools.doubts:
        _log.warning("%s", doubt)
    click.echo(f"criu {tools.criu_version} at {tools.criu}, {said}")


def _tried(settings: Settings, tools: Tools) -> str:
    """What was found out about CRIU by using it, in words; raises where it does not work."""
    if tools.criu is None:
        raise ToolError("CRIU is still missing: " + "; ".join(tools.missing))
    if os.geteuid() != 0:
        return "not tried out: that needs root"
    if tools.runc is None:
        check_criu(tools.criu)
        return "not tried out: that needs runc; its own check says yes"
    with scratch_folder(settings.state) as scratch:
        done = self_test(tools.runc, tools.criu, scratch)
    return f"saved a process in {done.saved_in_s:.2f} s, put it back in {done.restored_in_s:.2f} s"


@setup.command()
@click.pass_obj
def runc(settings: Settings) -> None:
    """Make runc available: the system's, installed with apt where it is missing."""
    if find_tools(settings.tools_dir).runc is None:
        install_package("runc", "nagara setup runc")
    tools = find_tools(settings.tools_dir)
    if tools.runc is None:
        raise ToolError("runc is still missing: " + "; ".join(tools.missing))
    click.echo(f"runc {tools.runc_version} at {tools.runc}")


@setup.command()
def kernel() -> None:
    """Compile the engine's CPU kernel here, once, instead of in each new replica.

    Without a C compiler the engine computes with torch's own operators, more slowly.
    """
    try:
        folder = compile_all()
    except UnsupportedError as error:
        click.echo(f"no kernel: {error}; the engine computes with torch's own operators")
        return
    click.echo(f"the engine's kernels in {folder}")


@setup.command()
def erofs() -> None:
    """Make mkfs.erofs available: the system's, installed with apt where it is missing."""
    if shutil.which("mkfs.erofs") is None:
        install_package("erofs-utils", "nagara setup erofs")
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise ToolError("mkfs.erofs is still missing, though its package is installed")
    click.echo(f"mkfs.erofs at {program}")
