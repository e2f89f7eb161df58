"""What the kernel reports of files that are opened."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.image.mounts import mount_overlay, unmount_if_mounted
from nagara.snapshot.opened import OpenedFiles

pytestmark = pytest.mark.root


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An overlay, as replicas have one."""
    folders = [tmp_path / name for name in ("lower", "upper", "work", "root")]
    for folder in folders:
        folder.mkdir()
    lower, upper, work, root = folders
    (lower / "inner").mkdir()
    for name in ("seen", "before", "inner/deep", "gone"):
        (lower / name).write_text(name)
    mount_overlay((lower,), upper, work, root)
    try:
        yield root
    finally:
        unmount_if_mounted(root)


def test_files_opened_in_the_root_are_noted_as_named_inside(root: Path) -> None:
    (root / "before").read_text()
    opened = OpenedFiles(root, ())
    try:
        (root / "seen").read_text()
        (root / "inner/deep").read_text()
    finally:
        opened.close()
    opened.close()
    (root / "before").read_text()
    assert opened.paths() == {"/seen", "/inner/deep"}


def test_of_bound_folders_what_lies_below_them_is_noted(root: Path, tmp_path: Path) -> None:
    bound, other = tmp_path / "bound", tmp_path / "bound-not"
    for folder in (bound, other):
        folder.mkdir()
        (folder / "file").write_text("x")
    opened = OpenedFiles(root, (bound,))
    try:
        for folder in (bound, other):
            (folder / "file").read_text()
    finally:
        opened.close()
    assert f"{bound}/file" in opened.paths()
    assert not any("bound-not" in path for path in opened.paths())


def test_fifos_and_deleted_files_do_not_hold_up_the_noting(root: Path) -> None:
    opened = OpenedFiles(root, ())
    try:
        os.mkfifo(root / "fifo")
        os.close(os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK))
        for _ in range(50):
            (root / "made").write_text("x")
            (root / "made").unlink()
            (root / "gone").read_text()
        (root / "seen").read_text()
    finally:
        opened.close()
    assert {"/gone", "/seen"} <= opened.paths()


def test_no_descriptor_is_left(root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        OpenedFiles(root, (root,)).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_place_that_cannot_be_watched_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OpenedFiles(tmp_path / "missing", ())
