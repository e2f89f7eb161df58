import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError
from nagara.image.folder_import import import_folder
from nagara.image.tree import Node
from nagara.store.store import Store


def read(store: Store, source: Path) -> Node:
    with ContentWriter(store) as writer:
        return import_folder(source, writer)


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
