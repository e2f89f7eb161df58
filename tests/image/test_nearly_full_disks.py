"""A disk that takes a part of what it is given: an error, and never a file with a hole in it."""

import io
import os
from pathlib import Path

import pytest

from nagara.base.linux import mount
from nagara.image.checkout import check_out
from nagara.image.content_writer import ContentWriter
from nagara.image.tree import Node, new_folder
from nagara.store.errors import FullError
from nagara.store.local import ObjectFolder
from nagara.store.store import Store
from nagara.testing.objects import noise

pytestmark = pytest.mark.root
_PAGE = 4096


@pytest.fixture
def disk(mounts: Path) -> Path:
    """A file system of 16 MB."""
    folder = mounts / "disk"
    folder.mkdir()
    mount("nagara-test", folder, "tmpfs", 0, "size=16m")
    return folder


def leave_free(disk: Path, size_bytes: int) -> None:
    """Takes all of it but so much."""
    state = os.statvfs(disk)
    used = state.f_bavail * state.f_frsize - size_bytes
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, used)


def test_a_stream_whose_last_piece_does_not_fit(disk: Path) -> None:
    folder = ObjectFolder(disk / "store")
    store = Store(folder.tenant("default"))
    size = 3 * (1 << 20) + 5 * _PAGE
    try:
        node = Node(0o100644)
        with ContentWriter(store) as writer:
            leave_free(disk, size - 3 * _PAGE)
            with pytest.raises(FullError):
                writer.add_stream(node, io.BytesIO(noise(size)), size)
        assert node.content is None
    finally:
        store.close()
        folder.close()


def test_a_checkout_whose_last_piece_does_not_fit(disk: Path, store: Store) -> None:
    size = 3 * (1 << 20) + 5 * _PAGE
    tree = new_folder()
    assert tree.kids is not None
    tree.kids[b"file"] = Node(0o100644, size=size, content=store.put_bytes(noise(size)))
    leave_free(disk, size - 3 * _PAGE)
    with pytest.raises(FullError) as raised:
        check_out(store, tree, disk / "target")
    assert raised.value.where == str(disk / "target")
