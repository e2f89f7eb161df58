"""Naming what is in a file, with the holes of sparse files skipped. Called from any thread."""

import errno
import hashlib
import mmap
import os
import threading
from concurrent.futures import Executor
from typing import NamedTuple

from nagara.store.errors import CorruptError
from nagara.store.names import (
    CHUNK_BYTES,
    WHOLE_LIMIT_BYTES,
    ChunkList,
    ObjectName,
    zero_hash,
)

# Small enough to stay in a core's cache, large enough that threads seldom change places.
_PIECE_BYTES = 1 << 20
_LOCAL = threading.local()


class Hashed(NamedTuple):
    """The name of a file's content, and its chunk list if it is large."""

    name: ObjectName
    chunk_list: bytes | None


def hash_file(descriptor: int, size: int, executor: Executor | None = None) -> Hashed:
    """Reads `size` bytes from the start of the file; large ones with all of `executor`'s threads.

    Raises `CorruptError` when the file ends earlier.
    """
    if size <= WHOLE_LIMIT_BYTES:
        return Hashed(ObjectName(hash_range(descriptor, 0, size), size), None)
    count = -(-size // CHUNK_BYTES)
    hole_ends = _Holes(descriptor, size)
    starts = [(at, min(CHUNK_BYTES, size - at)) for at in range(0, size, CHUNK_BYTES)]
    work = [None if hole_ends.covers(at, length) else (at, length) for at, length in starts]

    def digest(part: tuple[int, int]) -> bytes:
        return hash_range(descriptor, *part)

    found = iter((executor.map if executor else map)(digest, [part for part in work if part]))
    hashes = [
        next(found) if part else zero_hash(starts[index][1]) for index, part in enumerate(work)
    ]
    assert len(hashes) == count
    chunks = ChunkList(hashes, size)
    return Hashed(chunks.name, chunks.to_bytes())


def hash_range(descriptor: int, start: int, length: int) -> bytes:
    """sha256 of a part of a file. Raises `CorruptError` when that is not there or unreadable."""
    digest = hashlib.sha256()
    buffer = _buffer()
    end = start + length
    while start < end:
        # Always whole pages, as a descriptor past the page cache wants it.
        try:
            got = min(os.preadv(descriptor, [buffer], start), end - start)
        except OSError as error:
            if error.errno == errno.EIO:
                raise CorruptError("the disk cannot read it", where=f"at {start}") from error
            raise
        if not got:
            raise CorruptError("the file ends early", where=f"descriptor {descriptor}")
        digest.update(buffer[:got])
        start += got
    return digest.digest()


def _buffer() -> memoryview:
    """This thread's own, on whole pages: copying to others takes twice as long."""
    buffer: memoryview | None = getattr(_LOCAL, "buffer", None)
    if buffer is None:
        buffer = _LOCAL.buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    return buffer


class _Holes:
    """Where a file has no data; asked in ascending order."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._data = 0  # the next data at or after what was asked last
        self._asked = -1

    def covers(self, start: int, length: int) -> bool:
        if self._asked < 0 or (self._data <= start < self._size):
            self._data = next_data(self._descriptor, start, self._size)
            self._asked = start
        return self._data >= start + length


def next_data(descriptor: int, start: int, size: int) -> int:
    """Where the first data at or after `start` begins; `size` when only a hole follows."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return start
        raise
