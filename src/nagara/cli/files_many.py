"""A tree of very many files, imported and mounted by a process of its own: its memory and times.

    python -m nagara.cli.files_many FOLDER COUNT      prints one JSON object

The tree comes as a layer of an archive, made while it is read: what is measured is an import that
streams. One file in a hundred is an object of its own, the rest are small enough for the index.
For `nagara bench files`; needs root.
"""

import hashlib
import io
import json
import resource
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from nagara.image.content_writer import ContentWriter
from nagara.image.images import add_image
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounting import mount_index
from nagara.image.mounts import unmount_if_mounted
from nagara.image.tar_import import LayeredTree
from nagara.store.configured import open_folder, open_store
from nagara.store.local import DEFAULT_TENANT

_IN_A_FOLDER = 200
_SMALL_BYTES, _LARGE_BYTES = 150, 3000
_MOUNTS = 5


def members(count: int) -> Iterator[bytes]:
    """A tar stream of that many files, in pieces."""
    for number in range(count):
        size = _SMALL_BYTES if number % 100 else _LARGE_BYTES
        member = tarfile.TarInfo(f"d{number // _IN_A_FOLDER:06d}/module_{number:08d}.js")
        member.size, member.mtime = size, 1_700_000_000
        content = hashlib.shake_128(b"%d" % number).digest(size)
        yield member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


class _Joined(io.RawIOBase):
    """Pieces as one stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._left:
            self._left = next(self._pieces, b"")
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def measure(folder: Path, count: int) -> dict[str, float]:
    """Imports and mounts such a tree below `folder`."""
    objects = open_folder(folder / "store")
    store = open_store(objects, DEFAULT_TENANT)
    begun_s = time.perf_counter()
    with ContentWriter(store) as writer:
        tree = LayeredTree(writer)
        tree.add_layer(cast("io.BufferedReader", _Joined(members(count))), "many files")
    added = add_image(store, "many", tree.root, "a bench")
    import_s = time.perf_counter() - begun_s
    index = store.local.path(added.image.index)
    mounts = sorted(_mount_s(folder, index) for _ in range(_MOUNTS))
    store.close()
    objects.close()
    return {
        "files": count,
        "import_s": import_s,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "index_bytes": index.stat().st_size,
        "mount_ms": mounts[_MOUNTS // 2] * 1000,
        "mount_max_ms": mounts[-1] * 1000,
    }


def _mount_s(folder: Path, index: Path) -> float:
    lower, data, target = (folder / name for name in ("e", "d", "m"))
    for each in (lower, data, target):
        each.mkdir(exist_ok=True)
    begun_s = time.perf_counter()
    mount_index(index, lower)
    try:
        mount_overlay_on([lower], target, data=[data])
        took_s = time.perf_counter() - begun_s
        unmount_if_mounted(target)
    finally:
        unmount_if_mounted(lower)
    return took_s


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
