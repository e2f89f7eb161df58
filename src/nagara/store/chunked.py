"""A large object while it is being assembled from chunks, in any order, by several processes.

The sparse file `partial/NAME` has the final size from the start. A chunk is *here* for this
process when this process has seen its hash fit; chunks that another process (or an earlier one)
wrote are recognised by hashing them, so nothing but the file itself has to be kept. When all are
here the file is renamed and is an object.

Called from any thread.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from nagara.store.chunk_file import ChunkFile
from nagara.store.errors import BadNameError, FullError
from nagara.store.flights import Flights, range_claimed
from nagara.store.hashing import hash_range, next_data
from nagara.store.local import LocalTier, full_disk_named
from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName, covering, parse_chunk_list
from nagara.store.sink import FileSink, Sink
from nagara.store.transfer import Transfer


class Assembly:
    """One large object in the making."""

    def __init__(
        self, local: LocalTier, transfer: Transfer, name: ObjectName, chunks: ChunkList
    ) -> None:
        self.name = name
        self._local = local
        self._transfer = transfer
        self._chunks = chunks
        self._flights = Flights()
        self._has = bytearray(chunks.is_hole(i) for i in range(name.chunk_count))
        self._path = local.partial / str(name)
        self.is_object = False  # the file became the object
        space = sum(chunks.length(i) for i, has in enumerate(self._has) if not has)
        local.folder.make_room(max(0, space - _taken(self._path)))
        local.folder.ledger.add(local.tenant, str(name), space)
        with full_disk_named(self._path):
            self.file = ChunkFile(self._path, name.size)
            local.write_list(name, chunks.to_bytes())

    def close(self) -> None:
        """Closes the file; nobody may read from it any more."""
        self.file.close()

    def has(self, start: int, length: int) -> bool:
        """Those bytes can be read without waiting for a network."""
        return all(self._has[i] for i in covering(start, length))

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        """Returns when those bytes are here and verified; see `Reader.need`."""
        sink = FileSink(self.file.descriptor) if is_cached else self.file
        for index in covering(start, length):
            if not self._has[index]:
                self._flights.run(index, partial(self._get, index, sink, deadline_s), deadline_s)

    def complete(
        self, executor: Executor, deadline_s: float, arrived: Callable[[int], None] | None = None
    ) -> None:
        """Gets the missing chunks, in order, and makes the file an object."""
        missing = [index for index, has in enumerate(self._has) if not has]

        def one(index: int) -> None:
            self.need(index * CHUNK_BYTES, 1, deadline_s)
            if arrived is not None:
                arrived(self._chunks.length(index))

        for _ in executor.map(one, missing):
            pass
        if not self.is_object:
            self._flights.run("publish", self._publish, deadline_s)

    def _get(self, index: int, sink: Sink, deadline_s: float) -> None:
        start, length = index * CHUNK_BYTES, self._chunks.length(index)
        with range_claimed(self.file.descriptor, start, length, deadline_s):
            if not self._is_right(index):
                with full_disk_named(self._path):
                    self._transfer.chunk(self.name, self._chunks, index, sink, deadline_s)
        self._has[index] = True
        if all(self._has) and not self.is_object:
            self._flights.run("publish", self._publish, deadline_s)

    def _is_right(self, index: int) -> bool:
        start, length = index * CHUNK_BYTES, self._chunks.length(index)
        if next_data(self.file.descriptor, start, self.name.size) >= start + length:
            return False
        return hash_range(self.file.descriptor, start, length) == self._chunks.hashes[index]

    def _publish(self) -> None:
        if self.is_object:
            return
        try:
            self._local.adopt(self._path, self.name, self._chunks.to_bytes())
        except FileNotFoundError:
            # Another process finished it, or it was evicted under our hands: the descriptor
            # goes on working, but the file is not ours to name.
            if not self._local.has(self.name):
                raise FullError(
                    "it was evicted before it was complete", where=str(self.name)
                ) from None
        self.is_object = True


def _taken(path: Path) -> int:
    """Bytes that an earlier attempt has on the disk already."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def find_chunk_list(
    local: LocalTier, transfer: Transfer, name: ObjectName, deadline_s: float
) -> ChunkList:
    """From the disk if it is there and right, else from the tiers."""
    with contextlib.suppress(OSError, BadNameError):
        return parse_chunk_list(local.list_path(name).read_bytes(), name)
    return transfer.chunk_list(name, deadline_s)
