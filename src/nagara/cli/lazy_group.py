"""A click group whose sub-commands are imported when they are called, so that help is quick."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import click

from nagara.cli.command_examples import with_example


class Entry(NamedTuple):
    """One sub-command: where it is, and the line the group's help shows without importing it."""

    target: str  # "module:attribute"
    help: str


class LazyGroup(click.Group):
    """Derive from it and name the table; what is put into the table later is found, too."""

    entries: ClassVar[Mapping[str, Entry]]
    title: ClassVar[str] = "Commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: Any = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        words = [*ctx.command_path.split()[1:], cmd_name]  # without the program's own name
        return with_example(command, " ".join(words))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(self.title):
            formatter.write_dl([(name, entry.help) for name, entry in self.entries.items()])
