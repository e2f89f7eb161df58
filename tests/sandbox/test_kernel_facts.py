"""The checkpoint tool's findings about the kernel, where it does not keep them itself."""

import os
import subprocess
from pathlib import Path

import pytest

from nagara.sandbox import kernel_facts
from nagara.sandbox.kernel_facts import clear_torn, keep_kernel_facts, see_kernel_facts
from nagara.sandbox.tools import Tools

FACTS = Path("/run/criu.kdat")


def mounts_on_run() -> int:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(line.split()[4] == "/run" for line in lines)


def test_only_what_no_tool_can_be_writing_any_more_is_removed(tmp_path: Path) -> None:
    torn = tmp_path / "criu.kdat.tmp"
    clear_torn(tmp_path)
    torn.touch()
    clear_torn(tmp_path)
    assert torn.exists()
    os.utime(torn, (0, 0))
    clear_torn(tmp_path)
    assert not torn.exists()


def test_where_the_tool_keeps_them_itself_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "facts"
    file.write_text("of another kernel")
    monkeypatch.setattr(kernel_facts, "_is_in_memory", lambda _: True)
    assert keep_kernel_facts(tmp_path / "criu", file) is None
    assert not file.exists()


def test_a_tool_that_tells_nothing_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_facts, "_is_in_memory", lambda _: False)
    assert keep_kernel_facts(Path("/bin/false"), tmp_path / "facts") is None
    assert not (tmp_path / "facts").exists()


def test_a_tool_that_lies_in_run_itself_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_facts, "_is_in_memory", lambda _: False)
    assert kernel_facts.is_below_run(Path("/run/tools/criu"))
    assert not kernel_facts.is_below_run(tmp_path)
    assert keep_kernel_facts(Path("/run/tools/criu"), tmp_path / "facts") is None


@pytest.mark.root
def test_a_process_finds_them_where_the_tool_looks_and_nobody_else_does(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tools.criu is not None
    monkeypatch.setattr(kernel_facts, "_is_in_memory", lambda _: False)
    before = (mounts_on_run(), FACTS.exists())
    file = keep_kernel_facts(tools.criu, tmp_path / "facts")
    assert file is not None
    look = ["sh", "-c", f"cat {FACTS}; stat --format %a {FACTS} >&2"]
    seen = subprocess.run(
        look, capture_output=True, check=True, preexec_fn=lambda: see_kernel_facts(file)
    )
    assert seen.stdout == file.read_bytes() != b""
    assert seen.stderr == b"600\n"
    assert (mounts_on_run(), FACTS.exists()) == before
