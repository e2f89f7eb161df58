"""The root of the `nagara` command: options all sub-commands share, and how errors end.

It knows the names of the sub-commands, not their contents: each is imported when it is called,
so that `nagara --help` answers at once and no command pays for another's libraries. This is the
only place that catches `NagaraError`. Data goes to standard output, everything else to standard
error.
"""

import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from nagara.base.errors import NagaraError
from nagara.cli.exit_codes import EXIT_CODES, INTERRUPTED, exit_code_of
from nagara.cli.json_lines import JsonLines
from nagara.cli.lazy_group import Entry, LazyGroup
from nagara.cli.settings import Settings, read_settings, unwritable

COMMANDS: dict[str, Entry] = {
    "demo": Entry("nagara.cli.demo:demo", "Show a cold start, a snapshot and a restored start."),
    "up": Entry("nagara.cli.up:up", "Run the gateway and everything behind it on this machine."),
    "agent": Entry("nagara.cli.agent:agent", "Run this machine's node agent alone."),
    "deploy": Entry("nagara.cli.deploy:deploy", "Add or replace the apps of an app file."),
    "apps": Entry(
        "nagara.cli.apps:apps", "List the apps, their number of replicas, what is wrong."
    ),
    "logs": Entry("nagara.cli.logs:logs", "Print what an app's replicas wrote."),
    "trace": Entry("nagara.cli.trace:trace", "Show where the time of a start went."),
    "top": Entry("nagara.cli.top:top", "Watch apps and their rates as they change."),
    "init": Entry("nagara.cli.init:init", "Write a commented app file to begin with."),
    "exec": Entry("nagara.cli.exec_in:exec_", "Run a command inside a replica."),
    "versions": Entry("nagara.cli.versions:versions", "List the versions of an app."),
    "rollback": Entry("nagara.cli.versions:rollback", "Take an earlier version into use again."),
    "delete": Entry("nagara.cli.delete:delete", "Remove an app with its snapshots."),
    "backup": Entry("nagara.cli.backup:backup", "Save the state to a file, and bring it back."),
    "usage": Entry("nagara.cli.usage:usage", "Show what reserved slots were used for."),
    "snapshot": Entry(
        "nagara.cli.snapshot:snapshot", "Show saved replicas, and why an app has none."
    ),
    "secret": Entry("nagara.cli.secret:secret", "Set, list and remove the values of secrets."),
    "image": Entry("nagara.cli.image:image", "Import, mount and compare images."),
    "store": Entry("nagara.cli.store:store", "Look after objects and the tiers behind them."),
    "cache": Entry("nagara.cli.cache:cache", "Serve objects to the other machines of a zone."),
    "models": Entry("nagara.cli.models:models", "Add, list and remove model folders."),
    "engine": Entry("nagara.cli.engine:engine", "Serve one model with nagara's own engine."),
    "device": Entry(
        "nagara.cli.device:device", "Show this machine's devices, and try saving on them out."
    ),
    "machines": Entry(
        "nagara.cli.machines:machines", "List the machines: where they are, and how they do."
    ),
    "pool": Entry("nagara.cli.pool:pool", "Show and steer the machines that are kept ready."),
    "bench": Entry("nagara.cli.bench:bench", "Measure; every figure of the README comes from it."),
    "doctor": Entry("nagara.cli.doctor:doctor", "Try out what this machine can do; list leaks."),
    "setup": Entry("nagara.cli.setup:setup", "Get the tools that containers and snapshots need."),
    "errors": Entry("nagara.cli.errors_list:errors", "List what can go wrong, and exit codes."),
    "completion": Entry(
        "nagara.cli.completion:completion", "Print what a shell needs to complete commands."
    ),
    "version": Entry("nagara.cli.version:version", "Print the version."),
}


class _Root(LazyGroup):
    """The commands, and where their errors end."""

    entries = COMMANDS

    def invoke(self, ctx: click.Context) -> Any:
        fault: NagaraError | None
        try:
            return super().invoke(ctx)
        except NagaraError as error:
            fault = error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except OSError as error:
            fault = unwritable(error, ctx.obj) if isinstance(ctx.obj, Settings) else None
            if fault is None:
                raise
        return self._failed(ctx, fault)

    def _failed(self, ctx: click.Context, fault: NagaraError) -> NoReturn:
        logging.getLogger(__name__).debug("the error's origin", exc_info=fault)
        click.echo(f"error: {fault}", err=True)
        ctx.exit(exit_code_of(fault))


def _log_to_stderr(*, verbose: bool, as_json: bool) -> None:
    """nagara's own messages from INFO, others' from WARNING; `--verbose` lowers both a step."""
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else "%(message)s",
        level=logging.INFO if verbose else logging.WARNING,
    )
    logging.getLogger("nagara").setLevel(logging.DEBUG if verbose else logging.INFO)
    # One line for each request: for programs that read them, or when asked for.
    logging.getLogger("nagara.access").setLevel(
        logging.INFO if as_json or verbose else logging.WARNING
    )
    if as_json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


@click.group(
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes:\n"
    + "\n".join(f"  {code:<4} {meaning.partition(':')[0]}" for code, meaning in EXIT_CODES.items()),
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="NAGARA_STATE",
    help="Folder for models, tools, snapshots and the database  [default: /var/lib/nagara for "
    "root, else ~/.local/state/nagara; env: NAGARA_STATE]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar="NAGARA_LOG_FORMAT",
    help="How messages are written to standard error.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say more on standard error.")
@click.pass_context
def main(ctx: click.Context, state: Path | None, log_format: str, verbose: bool) -> None:
    """Run AI inference servers that fold away when idle and come back in about a second."""
    _log_to_stderr(verbose=verbose, as_json=log_format == "json")
    ctx.obj = read_settings(state, verbose=verbose)


if __name__ == "__main__":
    main()
