import os
from pathlib import Path

import pytest

from nagara.sandbox import tools
from nagara.sandbox.tools import (
    ToolError,
    Tools,
    check_criu,
    find_tools,
    install_package,
    own_criu,
)


def put_program(path: Path, says: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are looked for, besides the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tools, "_SYSTEM_FOLDERS", ())
    return folder


def shell_stays_reachable(bin_dir: Path) -> None:
    (bin_dir / "cat").symlink_to("/bin/cat")


def test_a_bare_machine_misses_both_and_says_how_to_get_them(bin_dir: Path, tmp_path: Path) -> None:
    found = find_tools(tmp_path / "tools")
    assert found == Tools(None, None, None, None, missing=found.missing)
    assert [text.split(" (")[0] for text in found.missing] == ["runc >= 1.1", "criu >= 4.2"]
    assert all("`nagara setup" in text for text in found.missing)


def test_new_enough_tools_of_the_system_are_used(bin_dir: Path, tmp_path: Path) -> None:
    shell_stays_reachable(bin_dir)
    runc = put_program(bin_dir / "runc", "runc version 1.1.5+ds1\ncommit: abc\nspec: 1.0.2-dev")
    criu = put_program(bin_dir / "criu", "Version: 4.2")
    put_program(own_criu(tmp_path / "tools"), "Version: 4.3")
    assert find_tools(tmp_path / "tools") == Tools(runc, criu, "1.1.5", "4.2", missing=())


@pytest.mark.parametrize("system", ["Version: 3.17.1", "Version: 4.1.1", "no idea"])
def test_an_older_criu_of_the_system_yields_to_nagaras_own(
    bin_dir: Path, tmp_path: Path, system: str
) -> None:
    shell_stays_reachable(bin_dir)
    put_program(bin_dir / "criu", system)
    own = put_program(own_criu(tmp_path / "tools"), "Version: 4.2.1")
    found = find_tools(tmp_path / "tools")
    assert (found.criu, found.criu_version) == (own, "4.2.1")


def test_an_old_criu_alone_is_named_with_its_version(bin_dir: Path, tmp_path: Path) -> None:
    shell_stays_reachable(bin_dir)
    put_program(bin_dir / "criu", "Version: 3.17.1\nGitID: v3.17.1")
    found = find_tools(tmp_path / "tools")
    assert (found.criu, found.criu_version) == (None, "3.17.1")
    assert f"criu >= 4.2 ({bin_dir}/criu is 3.17.1)" in found.missing[1]


def test_a_criu_newer_than_those_tried_is_used_and_said(bin_dir: Path, tmp_path: Path) -> None:
    shell_stays_reachable(bin_dir)
    put_program(bin_dir / "criu", "Version: 5.0")
    found = find_tools(tmp_path / "tools")
    assert found.criu == bin_dir / "criu"
    assert "criu 5.0 is newer" in found.doubts[0]


def test_a_torn_criu_counts_as_none(bin_dir: Path, tmp_path: Path) -> None:
    own = own_criu(tmp_path / "tools")
    own.parent.mkdir(parents=True)
    own.write_bytes(b"")
    own.chmod(0o755)
    assert find_tools(tmp_path / "tools").criu is None


def test_a_failing_check_says_what_criu_said(bin_dir: Path) -> None:
    shell_stays_reachable(bin_dir)
    criu = put_program(bin_dir / "criu", "Error: this kernel lacks PTRACE_PEEKSIGINFO", code=1)
    with pytest.raises(ToolError, match="PTRACE_PEEKSIGINFO"):
        check_criu(criu)


def test_without_apt_the_package_to_install_is_named(bin_dir: Path) -> None:
    with pytest.raises(ToolError, match=r"no apt-get[^\0]*package `runc`"):
        install_package("runc", "nagara setup runc")


def test_an_ordinary_user_is_told_to_be_root(
    bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(bin_dir / "apt-get", "never called", code=1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ToolError, match="needs root"):
        install_package("runc", "nagara setup runc")


def test_a_failing_apt_is_quoted(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell_stays_reachable(bin_dir)
    put_program(bin_dir / "apt-get", "Reading\nE: Unable to locate package runc\nbye", code=100)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ToolError, match="E: Unable to locate package runc"):
        install_package("runc", "nagara setup runc")


@pytest.mark.root
def test_the_prepared_tools_work_on_this_kernel(tools: Tools) -> None:
    assert tools.criu is not None
    check_criu(tools.criu)
