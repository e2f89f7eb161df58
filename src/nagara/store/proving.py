"""A large object of the local folder whose chunks are checked when they are first read.

So the first read of an object that nobody has proven yet waits for its chunk, not for all of
them. When every chunk was right, and the file is still in the state it was opened in, the whole
object is proven. A wrong chunk sends the file back to be assembled: what is right of it stays.

Called from any thread.
"""

import os
import threading
import weakref

from nagara.store.errors import CorruptError
from nagara.store.flights import Flights
from nagara.store.hashing import hash_range, next_data
from nagara.store.ledger import Proof
from nagara.store.local import LocalTier
from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName, covering


class ChunkProof:
    """Which chunks of one file were checked. Owns the descriptor."""

    def __init__(
        self, local: LocalTier, name: ObjectName, descriptor: int, chunks: ChunkList
    ) -> None:
        self.name = name
        self.descriptor = descriptor
        self.is_wrong = False
        self._local = local
        self._chunks = chunks
        self._flights = Flights()
        self._has = bytearray(name.chunk_count)
        self._missing = name.chunk_count
        self._lock = threading.Lock()
        state = os.fstat(descriptor)
        self._state = Proof(state.st_ino, state.st_size, state.st_ctime_ns)
        self._closer = weakref.finalize(self, os.close, descriptor)

    @property
    def is_open(self) -> bool:
        """It is neither proven nor refuted."""
        return self._missing > 0 and not self.is_wrong

    def has(self, start: int, length: int) -> bool:
        """Those bytes were checked."""
        return self._missing == 0 or all(self._has[i] for i in covering(start, length))

    def need(self, start: int, length: int, deadline_s: float) -> None:
        """Returns when those bytes were checked. Raises `CorruptError` when they are wrong."""
        for index in covering(start, length):
            if not self._has[index]:
                self._flights.run(index, lambda i=index: self._check(i), deadline_s)  # type: ignore[misc]

    def close(self) -> None:
        """Closes the file; nobody may read from it any more."""
        self._closer()

    def _check(self, index: int) -> None:
        if self._has[index]:
            return
        start, length = index * CHUNK_BYTES, self._chunks.length(index)
        is_hole = next_data(self.descriptor, start, self.name.size) >= start + length
        right = (
            self._chunks.is_hole(index)
            if is_hole
            else hash_range(self.descriptor, start, length) == self._chunks.hashes[index]
        )
        if not right:
            with self._lock:
                is_first, self.is_wrong = not self.is_wrong, True
            if is_first:
                self._local.statistics.fault()
                self._local.take_apart(self.name)
            raise CorruptError(f"chunk {index} is wrong", where=f"local {self.name}")
        with self._lock:
            self._has[index] = True
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._local.set_proven(self.name, self.descriptor, self._state)
