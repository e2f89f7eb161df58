from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli import setup as module
from nagara.cli.main import main
from nagara.sandbox import tools
from nagara.sandbox.tools import Tools, own_criu
from nagara.snapshot.self_test import SelfTest, SelfTestError

READY = Tools(Path("/x/runc"), Path("/x/criu"), "1.1.5", "4.2.1", missing=())
BARE = Tools(None, None, None, None, missing=("runc >= 1.1 (none found)",))


def test_tools_that_are_there_are_reported_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_tools", lambda _: READY)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    assert CliRunner().invoke(main, ["setup", "runc"]).stdout == "runc 1.1.5 at /x/runc\n"
    shown = CliRunner().invoke(main, ["setup", "criu"])
    assert shown.stdout == "criu 4.2.1 at /x/criu, not tried out: that needs root\n"


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A state folder whose owner counts as root; the tools are there."""
    monkeypatch.setattr(module, "find_tools", lambda _: READY)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return tmp_path


def test_as_root_criu_is_tried_out(as_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "self_test", lambda *_: SelfTest(0.3, 0.2, 1 << 20))
    shown = CliRunner().invoke(main, ["--state", str(as_root), "setup", "criu"])
    assert shown.exit_code == 0
    assert shown.stdout == (
        "criu 4.2.1 at /x/criu, saved a process in 0.30 s, put it back in 0.20 s\n"
    )
    assert list(as_root.glob("doctor-*")) == []


def test_a_system_criu_that_fails_its_trial_is_passed_over_until_it_changes(
    as_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, own = as_root / "bin/criu", own_criu(as_root / "tools")
    for program in (system, own):
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho Version: 4.3\n")
        program.chmod(0o755)

    def trial(runc: Path, criu: Path, scratch: Path) -> SelfTest:
        if criu == system:
            raise SelfTestError("the socket cannot be saved", where=str(criu))
        return SelfTest(0.3, 0.2, 1 << 20)

    monkeypatch.setattr(module, "self_test", trial)
    monkeypatch.setattr(tools, "on_path", lambda name: [system] if name == "criu" else [])
    found = lambda folder: replace(tools.find_tools(folder), runc=Path("/x/runc"))  # noqa: E731
    monkeypatch.setattr(module, "find_tools", found)
    shown = CliRunner().invoke(main, ["--state", str(as_root), "setup", "criu"])
    assert shown.exit_code == 0, shown.stderr
    assert f"criu 4.3 at {own}" in shown.stdout
    assert found(as_root / "tools").criu == own
    system.write_text("#!/bin/sh\necho Version: 4.3.1\n")
    assert found(as_root / "tools").criu == system


def test_an_own_criu_that_fails_its_trial_is_an_error(
    as_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(runc: Path, criu: Path, scratch: Path) -> SelfTest:
        raise SelfTestError("the socket cannot be saved", where=str(criu))

    own = replace(READY, criu=own_criu(as_root / "tools"))
    monkeypatch.setattr(module, "find_tools", lambda _: own)
    monkeypatch.setattr(module, "self_test", trial)
    shown = CliRunner().invoke(main, ["--state", str(as_root), "setup", "criu"])
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "criu/criu: the socket cannot be saved" in shown.stderr


def test_without_a_name_all_tools_are_set_up_and_each_failure_is_said(
    as_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(runc: Path, criu: Path, scratch: Path) -> SelfTest:
        raise SelfTestError("the socket cannot be saved", where=str(criu))

    own = replace(READY, criu=own_criu(as_root / "tools"))
    monkeypatch.setattr(module, "find_tools", lambda _: own)
    monkeypatch.setattr(module, "self_test", trial)
    monkeypatch.setattr(module.shutil, "which", lambda _: "/x/mkfs.erofs")
    monkeypatch.setattr(module, "compile_all", lambda: Path("/x/kernels"))
    shown = CliRunner().invoke(main, ["--state", str(as_root), "setup"])
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "the engine's kernels in /x/kernels",
        "runc 1.1.5 at /x/runc",
        "mkfs.erofs at /x/mkfs.erofs",
    ]
    assert "the socket cannot be saved" in shown.stderr
    assert "error: not set up: criu" in shown.stderr


def test_a_tool_still_missing_after_its_installation_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_tools", lambda _: BARE)
    monkeypatch.setattr(module, "install_package", lambda *_: None)
    shown = CliRunner().invoke(main, ["setup", "runc"])
    assert shown.exit_code == 1
    assert "runc is still missing: runc >= 1.1 (none found)" in shown.stderr


def test_a_given_folder_without_criu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    arguments = ["--state", str(tmp_path / "state"), "setup", "criu", "--from"]
    shown = CliRunner().invoke(main, [*arguments, str(tmp_path / "given")])
    assert shown.exit_code == 1
    assert "neither .deb files nor an unpacked `usr` tree" in shown.stderr
