"""Bytes that find no room on the disk: verified in memory, given out, soon forgotten.

A small cache keeps a reader that asks in small steps from fetching the same piece each time.
Called from any thread.
"""

import threading
import time
from collections import OrderedDict

from nagara.store.flights import Flights
from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName
from nagara.store.sink import MemorySink
from nagara.store.transfer import Transfer

_CACHE_BYTES = 128 << 20
_RETRY_S = 5.0


class PassingBy:
    """The cache and the fetching into it, for one store."""

    def __init__(self, transfer: Transfer, limit_bytes: int = _CACHE_BYTES) -> None:
        self._transfer = transfer
        self._limit_bytes = limit_bytes
        self._flights = Flights()
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[ObjectName, int], bytearray] = OrderedDict()
        self._used = 0
        self._lists: dict[ObjectName, ChunkList] = {}

    def fill(self, name: ObjectName, buffer: memoryview, start: int, deadline_s: float) -> None:
        """Fills the buffer with the object's bytes from `start`."""
        step = CHUNK_BYTES if name.is_chunked else name.size
        while buffer:
            index = start // step
            piece = self._piece(name, index, deadline_s)
            inner = start - index * step
            length = min(len(buffer), len(piece) - inner)
            buffer[:length] = piece[inner : inner + length]
            buffer, start = buffer[length:], start + length

    def _piece(self, name: ObjectName, index: int, deadline_s: float) -> bytearray:
        key = (name, index)
        found: list[bytearray] = []

        def work() -> None:
            found.append(self._fetch(name, index, deadline_s))
            self._keep(key, found[0])

        while True:
            with self._lock:
                held = self._held.get(key)
                if held is not None:
                    self._held.move_to_end(key)
                    return held
            self._flights.run(key, work, deadline_s)
            if found:
                return found[0]

    def _fetch(self, name: ObjectName, index: int, deadline_s: float) -> bytearray:
        if not name.is_chunked:
            sink = MemorySink(name.size)
            self._transfer.whole(name, sink, deadline_s)
            return sink.data
        if name not in self._lists:
            self._lists[name] = self._transfer.chunk_list(name, deadline_s)
        chunks = self._lists[name]
        sink = MemorySink(chunks.length(index), index * CHUNK_BYTES)
        if not chunks.is_hole(index):
            self._transfer.chunk(name, chunks, index, sink, deadline_s)
        return sink.data

    def _keep(self, key: tuple[ObjectName, int], data: bytearray) -> None:
        with self._lock:
            self._held[key] = data
            self._used += len(data)
            while self._used > self._limit_bytes and len(self._held) > 1:
                _, gone = self._held.popitem(last=False)
                self._used -= len(gone)


class PassingReader:
    """A `Reader` over `PassingBy`."""

    def __init__(self, passing: PassingBy, name: ObjectName) -> None:
        self._passing = passing
        self._name = name
        self._opened_s = time.monotonic()

    def is_here(self, start: int, length: int) -> bool:
        return False

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        """There is no place to keep them ready in."""

    def read_into(self, buffer: memoryview, start: int, deadline_s: float) -> None:
        self._passing.fill(self._name, buffer, start, deadline_s)

    def forget_cache(self, start: int, length: int) -> None:
        """Nothing of it is in the page cache."""

    def is_outdated(self) -> bool:
        """Now and then room is looked for again."""
        return time.monotonic() > self._opened_s + _RETRY_S

    def close(self) -> None:
        """Nothing is held."""
