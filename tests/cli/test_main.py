import importlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nagara import __version__
from nagara.base.errors import NagaraError, UsageError
from nagara.cli import main as root
from nagara.cli.bench import BENCHMARKS
from nagara.cli.lazy_group import Entry
from nagara.cli.main import COMMANDS, main
from nagara.cli.settings import Settings


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A sub-command `probe` that keeps its settings, or fails as its argument says."""
    seen: list[Settings] = []

    @click.command()
    @click.argument("failure", required=False)
    @click.pass_obj
    def command(settings: Settings, failure: str | None) -> None:
        seen.append(settings)
        click.echo("data")
        if failure == "usage":
            raise UsageError("the key is unknown", where="nagara.toml:3", hint="write `image`")
        if failure:
            raise NagaraError(failure)

    monkeypatch.setattr(root, "probe", command, raising=False)
    monkeypatch.setitem(COMMANDS, "probe", Entry("nagara.cli.main:probe", "Probe."))
    return seen


def test_the_help_names_every_command_with_its_line() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    for name, entry in COMMANDS.items():
        assert any(name in line and entry.help in line for line in shown.output.splitlines())


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_each_measurement_is_where_its_table_says(name: str) -> None:
    module, _, attribute = BENCHMARKS[name].target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_is_where_the_table_says_and_begins_its_help_alike(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert (command.help or "").split("\n")[0].strip()


def test_an_error_goes_to_stderr_with_its_place_and_hint_and_code(probe: list[Settings]) -> None:
    shown = CliRunner().invoke(main, ["probe", "usage"])
    assert shown.exit_code == 2
    assert shown.stdout == "data\n"
    assert shown.stderr == "error: nagara.toml:3: the key is unknown\nhint: write `image`\n"


def test_an_error_without_a_hint_prints_one_line(probe: list[Settings]) -> None:
    shown = CliRunner().invoke(main, ["probe", "it broke"])
    assert (shown.exit_code, shown.stderr) == (1, "error: it broke\n")


def test_the_state_folder_comes_from_the_option_or_the_environment(
    probe: list[Settings], tmp_path: Path
) -> None:
    CliRunner().invoke(main, ["--state", str(tmp_path), "-v", "probe"])
    CliRunner().invoke(main, ["probe"], env={"NAGARA_STATE": str(tmp_path / "other")})
    assert probe == [Settings(tmp_path, verbose=True), Settings(tmp_path / "other")]


def test_an_unknown_command_is_a_usage_error() -> None:
    shown = CliRunner().invoke(main, ["frobnicate"])
    assert shown.exit_code == 2
    assert "frobnicate" in shown.stderr


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(main, ["version"]).stdout == f"nagara {__version__}\n"
