"""Undoing the compression of a layer, whatever it is, and hashing what was read on the way.

Blocking; belongs to one thread.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from nagara.image.errors import BadArchiveError

_PIECE_BYTES = 1 << 18
# What reading a damaged stream raises beside OSError.
DAMAGED = (EOFError, ValueError, zlib.error, lzma.LZMAError)
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"


class HashedStream(io.RawIOBase):
    """A stream that hashes what is read from it. `limit` bounds how much that may be."""

    def __init__(self, stream: BinaryIO, limit: int | None = None) -> None:
        self._stream = stream
        self._left = limit
        self.hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise BadArchiveError("is longer than its description says")
        self.hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> str:
        """Reads the rest; returns `sha256:...` of everything."""
        while self.read(_PIECE_BYTES):
            pass
        return "sha256:" + self.hash.hexdigest()


@contextmanager
def decompressed(stream: BinaryIO) -> Iterator[BinaryIO]:
    """The content of a stream compressed with gzip, zstd, xz, bzip2, or not at all.

    Raises `BadArchiveError` where zstd is met and nothing on this machine reads it.
    """
    buffered = io.BufferedReader(_Pushed(stream), _PIECE_BYTES)
    head = buffered.peek(8)[:8]
    if head.startswith(_GZIP):
        with gzip.GzipFile(fileobj=buffered) as unpacked:
            yield unpacked  # type: ignore[misc]
    elif head.startswith(_ZSTD):
        with _zstd(buffered) as unpacked_zstd:
            yield unpacked_zstd
    elif head.startswith(_XZ):
        with lzma.LZMAFile(buffered) as unpacked_xz:
            yield unpacked_xz  # type: ignore[misc]
    elif head.startswith(_BZIP2):
        with bz2.BZ2File(buffered) as unpacked_bzip2:
            yield unpacked_bzip2  # type: ignore[misc]
    else:
        yield buffered


class _Pushed(io.RawIOBase):
    """Any object with `read` as a raw stream; it is not closed with it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _zstd(stream: BinaryIO) -> Iterator[BinaryIO]:
    """By the program `zstd`: the standard library learns it in Python 3.14."""
    program = shutil.which("zstd")
    if program is None:
        raise BadArchiveError("is compressed with zstd", hint="apt-get install zstd")
    process = subprocess.Popen(
        [program, "-dc", "--quiet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    failed: list[BaseException] = []

    def feed(target: BinaryIO) -> None:
        try:
            with target:
                shutil.copyfileobj(stream, target, _PIECE_BYTES)
        except BrokenPipeError:
            pass
        except (OSError, ValueError, BadArchiveError) as error:
            failed.append(error)

    feeder = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
    feeder.start()
    try:
        yield process.stdout  # type: ignore[misc]
        while process.stdout.read(_PIECE_BYTES):
            pass
        feeder.join()
        if process.wait() != 0 or failed:
            raise BadArchiveError("its zstd stream is damaged")
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
        feeder.join()
