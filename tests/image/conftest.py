"""Folders on a file system that can carry overlay's marks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.image.mounts import mount_points, unmount_tree


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Path]:
    """A folder below which tests mount; nothing stays mounted there."""
    yield tmp_path
    unmount_tree(tmp_path)
    assert mount_points(tmp_path) == []
