"""Memory for pieces under way, used again: fresh pages cost more than the copy into them.

Every buffer begins with a page, so that it can be written past the page cache. Called from any
thread; how many are in use at a time is bounded by the byte budget of the transfers.
"""

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from nagara.store.names import CHUNK_BYTES

# What is kept for the next ones; the pages are there already.
_SPARE: deque[memoryview] = deque(maxlen=16)


@contextmanager
def piece_buffer(length: int) -> Iterator[memoryview]:
    """`length` bytes (up to a chunk's) with anything in them; nobody's after the `with` block."""
    if length > CHUNK_BYTES:
        raise ValueError("a piece is no longer than a chunk")
    try:
        buffer = _SPARE.pop()
    except IndexError:
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    try:
        yield buffer[:length]
    finally:
        _SPARE.append(buffer)
