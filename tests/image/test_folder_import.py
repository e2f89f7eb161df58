import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError, UnrepresentableError
from nagara.image.folder_import import import_folder
from nagara.image.mounts import mount_overlay, unmount_if_mounted
from nagara.image.tree import Node, walk
from nagara.store.store import Store


def read(store: Store, source: Path, **options: Any) -> Node:
    with ContentWriter(store) as writer:
        return import_folder(source, writer, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "file").touch()
    os.setxattr(folder / "file", "user.kept", b"1")
    os.setxattr(folder / "file", "user.strange", b"2")
    return folder


def answer_strange(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From now on one attribute cannot be read."""
    real = os.getxattr

    def getxattr(path: Any, name: Any, **options: Any) -> bytes:
        if os.fsencode(name) == b"user.strange":
            raise OSError(number, os.strerror(number), path)
        return real(path, name, **options)

    monkeypatch.setattr(os, "getxattr", getxattr)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.EACCES, errno.ERANGE])
def test_an_attribute_that_cannot_be_read_is_named(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    answer_strange(monkeypatch, number)
    with pytest.raises(SourceError, match=r"user\.strange cannot be read") as caught:
        read(store, source)
    assert str(source / "file") in str(caught.value)


def test_an_attribute_that_goes_away_meanwhile_is_no_error(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_strange(monkeypatch, errno.ENODATA)
    kids = read(store, source).kids
    assert kids is not None
    assert kids[b"file"].xattrs == ((b"user.kept", b"1"),)


@pytest.mark.root
def test_a_layer_keeps_its_marks_and_drops_overlays_notes_to_itself(
    store: Store, mounts: Path
) -> None:
    base, upper, work, root = (mounts / name for name in ("base", "upper", "work", "root"))
    for folder in (base / "kept", base / "replaced", upper, work, root):
        folder.mkdir(parents=True)
    for file in ("kept/changed", "replaced/old", "deleted"):
        (base / file).write_bytes(b"old")
    mount_overlay([base], upper, work, root)
    (root / "kept/changed").write_bytes(b"new")
    os.setxattr(root / "kept/changed", "user.note", b"1")
    (root / "deleted").unlink()
    (root / "replaced/old").unlink()
    (root / "replaced").rmdir()
    (root / "replaced").mkdir()
    unmount_if_mounted(root)
    os.setxattr(upper, "trusted.overlay.uuid", b"x" * 16)
    notes = [name for path in upper.rglob("*") for name in os.listxattr(path)]
    assert {"trusted.overlay.origin", "trusted.overlay.impure"} <= {*notes, *os.listxattr(upper)}

    nodes = dict(walk(read(store, upper, is_layer=True)))

    assert {path: node.xattrs for path, node in nodes.items() if node.xattrs} == {
        b"kept/changed": ((b"user.note", b"1"),),
        b"replaced": ((b"trusted.overlay.opaque", b"y"),),
    }
    assert nodes[b"kept/changed"].inline == b"new"
    assert (nodes[b"deleted"].kind, nodes[b"deleted"].rdev) == (stat.S_IFCHR, 0)
    with pytest.raises(UnrepresentableError, match="deleted"):
        read(store, upper)  # a whiteout means something in a layer only
