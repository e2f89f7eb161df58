import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from nagara.cli.files_lab import needed_packages, opened_lab
from nagara.cli.files_many import measure, members


def test_a_tree_of_many_files_is_a_well_formed_archive() -> None:
    raw = b"".join(members(250))
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        found = archive.getmembers()
    assert len({member.name for member in found}) == 250
    assert {member.size for member in found} == {150, 3000}


@pytest.mark.root
def test_it_is_imported_and_mounted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = measure(tmp_path, 500)
    assert found["files"] == 500
    assert found["mount_max_ms"] > 0
    assert found["index_bytes"] > 500 * 150


def test_the_packages_that_an_import_needs_are_found() -> None:
    names = {path.name for path in needed_packages("aiohttp")}
    assert {"aiohttp", "multidict", "yarl"} <= names
    assert "torch" not in names


def test_the_lab_leaves_no_keeper(tmp_path: Path) -> None:
    with opened_lab(tmp_path / "lab") as lab:
        pids = [
            pid
            for pid in (path.name for path in Path("/proc").iterdir())
            if str(lab.keeper) in command_of(pid)
        ]
        assert pids
    deadline_s = time.monotonic() + 20
    while any(command_of(pid) for pid in pids):  # it ends by itself, a moment later
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert not (tmp_path / "lab").exists()


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
