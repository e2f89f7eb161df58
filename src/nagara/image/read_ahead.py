"""Getting large objects ready ahead of who reads them in sequence: fetched, and verified.

The kernel's own read-ahead is kept short, because where a file is mapped it goes around each
fault and asks for what nobody wants. Here it begins when the third chunk in a row was not ready
(what a trace brought in time needs none), and doubles with each further one.

Called from the channel's threads; the work is done by a pool of its own.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nagara.store.errors import StoreError
from nagara.store.names import CHUNK_BYTES, ObjectName

_log = logging.getLogger(__name__)
CHUNKS_AHEAD = 8
WAITS = 3
_OBJECTS = 256
_TIME_LIMIT_S = 60.0

Prepare = Callable[[ObjectName, int, float], None]  # object, where, deadline


class Sequence:
    """How one object is read: which chunks shall be ready by now. Pure."""

    def __init__(self, chunk_count: int) -> None:
        self._chunk_count = chunk_count
        self._last = -2  # the farthest chunk that was read
        self._waits = 0  # how many in sequence had to be waited for
        self._ready = 0  # chunks before this one were asked for
        self._ahead = 1

    def read(self, chunk: int, *, is_ready: bool) -> range:
        """A chunk is read; returns those to get ready now."""
        if chunk in (self._last, self._last - 1):  # the kernel's requests overtake each other
            return range(0)
        if chunk != self._last + 1:
            self._waits = self._ready = 0
            self._ahead = 1
        self._last = chunk
        self._waits += not is_ready
        if self._waits < WAITS:
            return range(0)
        begin = max(self._ready, chunk + 1)
        self._ready = max(begin, min(chunk + 1 + self._ahead, self._chunk_count))
        self._ahead = min(2 * self._ahead, CHUNKS_AHEAD)
        return range(begin, self._ready)


class ReadAhead:
    """All objects of a daemon.

    Args:
        prepare: gets one place of an object ready; may block, and raise `StoreError`.
    """

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(CHUNKS_AHEAD, "ahead")
        self._lock = threading.Lock()
        self._sequences: OrderedDict[ObjectName, Sequence] = OrderedDict()

    def read(self, name: ObjectName, offset: int, *, is_ready: bool) -> None:
        """A large object is read there, where its bytes are ready or have to be waited for."""
        with self._lock:
            sequence = self._sequences.get(name)
            if sequence is None:
                sequence = self._sequences[name] = Sequence(name.chunk_count)
                while len(self._sequences) > _OBJECTS:
                    self._sequences.popitem(last=False)
            wanted = sequence.read(offset // CHUNK_BYTES, is_ready=is_ready)
        for chunk in wanted:
            self._pool.submit(self._get, name, chunk * CHUNK_BYTES)

    def _get(self, name: ObjectName, start: int) -> None:
        try:
            self._prepare(name, start, time.monotonic() + _TIME_LIMIT_S)
        except (StoreError, OSError) as error:  # whoever reads there finds out
            _log.debug("not ready ahead of need: %s", error)
