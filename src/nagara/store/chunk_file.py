"""The file of a large object in the making: its chunks go past the page cache while that pays.

Who reads the object caches it on the other side of a mount: in this file's own cache the same
bytes would only take memory, and new pages cost more than the copy into them. So a chunk is
written straight to the disk while few others are being written. A disk that cannot keep up with
the network has the rest written through the page cache, and nobody waits for it.

Where the file system has no such access, everything goes through the page cache. Called from any
thread.
"""

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from nagara.store.names import CHUNK_BYTES, covering
from nagara.store.sink import FileSink

_PAGE = mmap.PAGESIZE
# A fast disk needs no more at a time; of a slow one no more is waited for.
_STRAIGHT = threading.BoundedSemaphore(2)


class ChunkFile:
    """A `Sink` that can be read from at any place. The last who has it closes it."""

    def __init__(self, path: Path, size: int) -> None:
        """Makes the file unless it is there, of its final size. Raises OSError."""
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closers = [weakref.finalize(self, os.close, self.descriptor)]
        os.ftruncate(self.descriptor, size)
        self._straight: int | None = None
        try:
            self._straight = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            self._closers.append(weakref.finalize(self, os.close, self._straight))
        self._uncached = bytearray(-(-size // CHUNK_BYTES))  # chunks that went straight

    def close(self) -> None:
        """Closes the file; nobody may use it any more."""
        for closer in self._closers:
            closer()

    def write(self, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if self._straight is not None and _STRAIGHT.acquire(blocking=False):
            try:
                written = self._write_straight(self._straight, view, start)
            finally:
                _STRAIGHT.release()
            for index in covering(start, written):
                self._uncached[index] = 1
            view, start = view[written:], start + written
        FileSink(self.descriptor).write(start, view)

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, start)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills the whole buffer. Raises OSError."""
        while buffer:
            index = start // CHUNK_BYTES
            length = min(len(buffer), (index + 1) * CHUNK_BYTES - start)
            self._read_chunk(buffer[:length], start, is_cached=not self._uncached[index])
            buffer, start = buffer[length:], start + length

    def forget_cache(self, start: int, length: int) -> None:
        """The kernel need not keep these bytes."""
        if not all(self._uncached[index] for index in covering(start, length)):
            os.posix_fadvise(self.descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def _read_chunk(self, buffer: memoryview, start: int, *, is_cached: bool) -> None:
        whole = len(buffer) // _PAGE * _PAGE
        if whole and not is_cached and self._straight is not None:
            got = _unless_refused(lambda: os.preadv(self._straight, [buffer[:whole]], start))  # type: ignore[arg-type]
            buffer, start = buffer[got:], start + got
        while buffer:
            got = os.preadv(self.descriptor, [buffer], start)
            if got == 0:
                raise OSError(errno.EIO, "the file ends early")
            buffer, start = buffer[got:], start + got

    @staticmethod
    def _write_straight(descriptor: int, view: memoryview, start: int) -> int:
        whole = len(view) // _PAGE * _PAGE
        return _unless_refused(lambda: os.pwrite(descriptor, view[:whole], start)) if whole else 0


def _unless_refused(call: Callable[[], int]) -> int:
    """What it moved; nothing where place or memory do not suit this way."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
