from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli import setup as module
from nagara.cli.main import main
from nagara.sandbox.tools import ToolError, Tools

READY = Tools(Path("/x/runc"), Path("/x/criu"), "1.1.5", "4.2.1", missing=())
BARE = Tools(None, None, None, None, missing=("runc >= 1.1 (none found)",))


def test_tools_that_are_there_are_reported_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_tools", lambda _: READY)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    assert CliRunner().invoke(main, ["setup", "runc"]).stdout == "runc 1.1.5 at /x/runc\n"
    shown = CliRunner().invoke(main, ["setup", "criu"])
    assert shown.stdout == "criu 4.2.1 at /x/criu, not checked: that needs root\n"


def test_as_root_criu_is_checked_against_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(criu: Path) -> None:
        raise ToolError("CRIU does not work on this kernel", where=str(criu))

    monkeypatch.setattr(module, "find_tools", lambda _: READY)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "check_criu", refuse)
    shown = CliRunner().invoke(main, ["setup", "criu"])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "/x/criu: CRIU does not work on this kernel" in shown.stderr


def test_a_tool_still_missing_after_its_installation_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_tools", lambda _: BARE)
    monkeypatch.setattr(module, "install_runc", lambda: None)
    shown = CliRunner().invoke(main, ["setup", "runc"])
    assert shown.exit_code == 1
    assert "runc is still missing: runc >= 1.1 (none found)" in shown.stderr


def test_a_given_folder_without_criu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    arguments = ["--state", str(tmp_path / "state"), "setup", "criu", "--from"]
    shown = CliRunner().invoke(main, [*arguments, str(tmp_path / "given")])
    assert shown.exit_code == 1
    assert "neither .deb files nor an unpacked `usr` tree" in shown.stderr
