"""`nagara bench`: one sub-command per measurement, imported on use.

Each prints a table, or with `--json` one JSON object on standard output and nothing else there.
"""

import importlib
from typing import NamedTuple

import click


class _Entry(NamedTuple):
    target: str  # "module:attribute"
    help: str


BENCHMARKS: dict[str, _Entry] = {
    "planner": _Entry(
        "nagara.cli.bench_planner:planner", "Plans over large catalogues, and claims of slots."
    ),
    "coldstart": _Entry(
        "nagara.cli.bench_coldstart:coldstart",
        "From a request to the first token, started plainly and restored.",
    ),
    "rounds": _Entry(
        "nagara.cli.bench_rounds:rounds",
        "Folded to zero and called by several at once, many times; what is left afterwards.",
    ),
    "files": _Entry(
        "nagara.cli.bench_files:files",
        "Images and the store: index, mounts, cold and warm imports, reading.",
    ),
    "overlap": _Entry(
        "nagara.cli.bench_engine:overlap",
        "How busy the device is with and without a step in flight.",
    ),
    "engine": _Entry(
        "nagara.cli.bench_engine:engine",
        "The engine's speed against what its linear layers alone allow.",
    ),
}


class _Benchmarks(click.Group):
    """A group whose measurements are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = BENCHMARKS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Measurements"):
            formatter.write_dl([(name, entry.help) for name, entry in BENCHMARKS.items()])


@click.group(cls=_Benchmarks)
def bench() -> None:
    """Measure; every figure of the README comes from here."""
