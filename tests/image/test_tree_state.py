import os
import shutil
from pathlib import Path

import pytest

from nagara.image import file_memory, tree_state
from nagara.image.file_memory import FileMemory
from nagara.store.names import ObjectName

NAME = ObjectName(b"\x01" * 32, 5000)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/file").write_text("text")
    (folder / "link").symlink_to("inner")
    return folder


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was just written counts as written long ago."""
    for module in (tree_state, file_memory):
        monkeypatch.setattr(module, "_QUIET_S", -1e9)


def same_time_and_size(path: Path) -> None:
    state = path.stat()
    path.write_text("next")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "new").touch(),
        lambda tree: (tree / "link").unlink(),
        lambda tree: (tree / "inner/file").chmod(0o600),
        lambda tree: os.setxattr(tree / "inner/file", "user.note", b"x"),
        lambda tree: (tree / "inner/file").rename(tree / "inner/other"),
        lambda tree: same_time_and_size(tree / "inner/file"),
        lambda tree: shutil.rmtree(tree),
    ],
    ids=["new", "gone", "mode", "attribute", "name", "content", "all"],
)
def test_every_change_is_another_state(tree: Path, later: None, change: object) -> None:
    before = tree_state.tree_state([tree])
    assert before is not None
    assert tree_state.tree_state([tree]) == before
    change(tree)  # type: ignore[operator]
    assert tree_state.tree_state([tree]) != before


def test_a_tree_that_has_just_changed_has_no_state(tree: Path) -> None:
    assert tree_state.tree_state([tree]) is None


def test_the_order_of_roots_is_nothing(tree: Path, later: None, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert tree_state.tree_state([tree, absent]) == tree_state.tree_state([absent, tree])
    assert tree_state.tree_state([tree, absent]) != tree_state.tree_state([tree])


def test_a_file_is_remembered_until_it_changes(tree: Path, later: None, tmp_path: Path) -> None:
    path, database = tree / "inner/file", tmp_path / "imports.sqlite"
    with FileMemory(database) as memory:
        assert memory.find(path.stat()) is None
        memory.note(path.stat(), NAME)
    with FileMemory(database) as memory:
        assert memory.find(path.stat()) == NAME
        same_time_and_size(path)
        assert memory.find(path.stat()) is None


def test_a_file_that_has_just_changed_is_not_remembered(tree: Path, tmp_path: Path) -> None:
    path, database = tree / "inner/file", tmp_path / "imports.sqlite"
    path.write_text("now")
    with FileMemory(database) as memory:
        memory.note(path.stat(), NAME)
    with FileMemory(database) as memory:
        assert memory.find(path.stat()) is None


def test_a_damaged_memory_is_an_empty_one(tree: Path, later: None, tmp_path: Path) -> None:
    database = tmp_path / "imports.sqlite"
    database.write_bytes(b"no database" * 1000)
    with FileMemory(database) as memory:
        memory.note((tree / "inner/file").stat(), NAME)
        assert memory.find((tree / "inner/file").stat()) is None
