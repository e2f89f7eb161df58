"""What holds for every command: an example that can be parsed, JSON, help for each option."""

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from nagara.cli.command_examples import EXAMPLES
from nagara.cli.errors_list import all_kinds, all_messages
from nagara.cli.exit_codes import EXIT_CODES
from nagara.cli.main import main

# These serve until they are stopped, or write what is not for programs.
WITHOUT_JSON = {
    "up": "serves", "agent": "serves", "cache serve": "serves", "engine serve": "serves",
    "store scrub": "serves", "logs": "prints what others wrote", "exec": "runs another's command",
    "demo": "is a show", "completion": "prints a script", "init": "writes a file",
    "snapshot hooks": "prints a module", "secret set": "says nothing",
    "secret rm": "says nothing",
    "setup": "changes the machine", "setup criu": "changes the machine",
    "setup runc": "changes the machine", "setup erofs": "changes the machine",
    "setup kernel": "changes the machine", "image mount": "changes the machine",
    "image umount": "changes the machine", "backup save": "writes a file",
    "backup restore": "changes the machine",
}  # fmt: skip


def commands(
    group: click.Group = main, ctx: click.Context | None = None, words: str = ""
) -> Iterator[tuple[str, click.Command]]:
    ctx = ctx or click.Context(main, info_name="nagara")
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        path = f"{words} {name}".strip()
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=ctx)
            yield from commands(command, inner, path)
            if not command.invoke_without_command:
                continue
        yield path, command


ALL = dict(commands())


@pytest.mark.parametrize("words", ALL)
def test_each_command_has_an_example_that_it_can_parse(words: str) -> None:
    assert words in EXAMPLES, f"give `nagara {words}` an example in nagara.cli.command_examples"
    shown = CliRunner().invoke(main, [*words.split(), "--help"], prog_name="nagara")
    assert shown.exit_code == 0
    assert EXAMPLES[words] in shown.output
    if words == "completion":
        return  # inside a shell's eval
    call = shlex.split(EXAMPLES[words].partition(" > ")[0].partition(" < ")[0])
    call = call[1:] if call[0] == "sudo" else call
    parts = words.split()
    assert call[: 1 + len(parts)] == ["nagara", *parts]
    ALL[words].make_context(parts[-1], call[1 + len(parts) :], resilient_parsing=False)


@pytest.mark.parametrize("words", ALL)
def test_each_command_that_shows_something_has_json(words: str) -> None:
    has_json = any("--json" in option.opts for option in ALL[words].params)
    assert has_json != (words in WITHOUT_JSON), WITHOUT_JSON.get(words, "it should have --json")


@pytest.mark.parametrize("words", ALL)
def test_each_option_says_what_it_is(words: str) -> None:
    silent = [
        option.name
        for option in ALL[words].params
        if isinstance(option, click.Option) and not option.hidden and not option.help
    ]
    assert silent == []


def test_no_example_is_of_a_command_that_is_gone() -> None:
    assert EXAMPLES.keys() - ALL.keys() == set()


def test_every_kind_of_error_says_what_it_is_and_ends_with_a_documented_code() -> None:
    kinds = list(all_kinds())
    assert len(kinds) > 50
    assert [kind.name for kind in kinds if not kind.what] == []
    assert {kind.exit_code for kind in kinds} <= EXIT_CODES.keys()


def test_messages_are_found_with_their_hints() -> None:
    found = list(all_messages())
    running = [one for one in found if one.text == "nagara is not running here"]
    assert [(one.kind, one.hint) for one in running] == [
        ("NotRunningError", "start it with: nagara up (or name its folder with --state)")
    ]
    full = next(one for one in found if one.code == "queue_full")
    assert (full.kind, full.status) == ("Refusal", 429)


def test_messages_begin_small_and_end_without_a_full_stop() -> None:
    """They stand behind `error:` and a place; a sentence of its own is a hint."""
    odd = [
        f"{one.place}: {one.text}"
        for one in all_messages()
        if one.text and (one.text.rstrip().endswith(".") and not one.text.endswith("..."))
    ]
    assert odd == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell: str) -> None:
    shown = CliRunner().invoke(main, ["completion", shell])
    assert shown.exit_code == 0
    assert "_NAGARA_COMPLETE" in shown.stdout
    assert "nagara" in shown.stdout


def test_commands_are_completed() -> None:
    asked = {"_NAGARA_COMPLETE": "bash_complete", "COMP_WORDS": "nagara dep", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(main, [], env=asked, prog_name="nagara")
    assert "plain,deploy" in shown.output
