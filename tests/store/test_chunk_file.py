import errno
import os
import threading
from pathlib import Path

import pytest

from nagara.store import chunk_file
from nagara.store.chunk_file import ChunkFile
from nagara.store.names import CHUNK_BYTES
from nagara.store.piece_buffers import piece_buffer
from nagara.testing.objects import noise

_CONTENT = noise(2 * CHUNK_BYTES + 12345)
_WAYS = ["straight", "through the cache", "not supported", "refused"]


@pytest.fixture(params=_WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the bytes go to the disk and back."""
    chosen: str = request.param
    if chosen == "through the cache":
        busy = threading.BoundedSemaphore(1)  # as if others were being written
        assert busy.acquire()
        monkeypatch.setattr(chunk_file, "_STRAIGHT", busy)
    if chosen in ("not supported", "refused"):
        open_file, write = os.open, os.pwrite
        straight: list[int] = []

        def opened(path: Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT and chosen == "not supported":
                raise OSError(errno.EINVAL, "no such access here")
            descriptor = open_file(path, flags, mode)
            straight.extend([descriptor] if flags & os.O_DIRECT else [])
            return descriptor

        def written(descriptor: int, data: memoryview, start: int) -> int:
            if descriptor in straight:
                raise OSError(errno.EINVAL, "not on a block")
            return write(descriptor, data, start)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "pwrite", written)
    return chosen


def fill(file: ChunkFile, index: int) -> None:
    start = index * CHUNK_BYTES
    content = _CONTENT[start : start + CHUNK_BYTES]
    with piece_buffer(len(content)) as buffer:
        buffer[:] = content
        file.write(start, buffer)


def test_chunks_written_in_any_order_are_read_back_at_any_place(tmp_path: Path, way: str) -> None:
    file = ChunkFile(tmp_path / "file", len(_CONTENT))
    for index in (2, 0, 1):
        fill(file, index)
    end = len(_CONTENT)
    places = [(0, end), (0, 4096), (1, 3), (CHUNK_BYTES - 5000, 10000), (end - 1, 1), (end, 0)]
    places += [(end - 12345, 12345), (CHUNK_BYTES, CHUNK_BYTES), (4096, 5000)]
    for start, length in places:
        buffer = bytearray(length)
        file.read_into(memoryview(buffer), start)
        assert buffer == _CONTENT[start : start + length], (start, length, way)
        file.forget_cache(start, length)
    assert (tmp_path / "file").read_bytes() == _CONTENT
    file.close()


def test_a_buffer_on_no_page_is_written_and_read_all_the_same(tmp_path: Path, way: str) -> None:
    file = ChunkFile(tmp_path / "file", len(_CONTENT))
    odd = memoryview(bytearray(CHUNK_BYTES + 1))[1:]
    odd[:] = _CONTENT[:CHUNK_BYTES]
    file.write(0, odd)
    odd[:] = bytes(CHUNK_BYTES)
    file.read_into(odd, 0)
    assert odd == _CONTENT[:CHUNK_BYTES]
    file.close()


def test_reading_over_the_end_is_an_error(tmp_path: Path, way: str) -> None:
    file = ChunkFile(tmp_path / "file", 10000)
    with pytest.raises(OSError, match="ends early"):
        file.read_into(memoryview(bytearray(8192)), 4096)
    file.close()


def test_straight_chunks_take_no_page_cache(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT))
    except OSError:
        pytest.skip("needs a file system with O_DIRECT")
    file = ChunkFile(tmp_path / "file", len(_CONTENT))
    fill(file, 0)
    buffer = memoryview(bytearray(1))
    with pytest.raises(BlockingIOError):  # nothing is cached
        os.preadv(file.descriptor, [buffer], 0, os.RWF_NOWAIT)
    file.close()


def test_a_buffer_serves_one_at_a_time_and_again() -> None:
    with piece_buffer(10) as first, piece_buffer(CHUNK_BYTES) as second:
        first[:], second[:] = b"a" * 10, b"b" * CHUNK_BYTES
        assert bytes(first) == b"a" * 10
    with pytest.raises(ValueError, match="no longer than a chunk"), piece_buffer(CHUNK_BYTES + 1):
        pass
