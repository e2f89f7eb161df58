"""Where arriving bytes are put until their object is verified: a file, or memory."""

import os
from typing import Protocol


class Sink(Protocol):
    """Written out of order by several threads, then read back in order for the hash."""

    def write(self, start: int, data: bytes | memoryview) -> None: ...

    def read(self, start: int, length: int) -> bytes: ...


class FileSink:
    """An open file. The caller owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data)  # a disk that is nearly full takes less than it is given
        while view:
            written = os.pwrite(self._descriptor, view, start)
            view, start = view[written:], start + written

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start)


class MemorySink:
    """Bytes of one object that begin at `origin` within it."""

    def __init__(self, length: int, origin: int = 0) -> None:
        self.data = bytearray(length)
        self._origin = origin

    def write(self, start: int, data: bytes | memoryview) -> None:
        start -= self._origin
        self.data[start : start + len(data)] = data

    def read(self, start: int, length: int) -> bytes:
        start -= self._origin
        return bytes(self.data[start : start + length])
