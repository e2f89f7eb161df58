"""One tenant's objects, as a caller wants them: named, whole, verified, from wherever is nearest.

    local folder ← zone cache ← origin or CDN ← bucket

What is fetched is kept locally and sent to the nearer tiers that take it. However many threads
and processes want an object, it is fetched once, unless the process that fetches it gets nowhere.
When the disk is full, bytes pass it by: they are verified in memory and given out, and nothing
fails.

Called from any thread. Every call has a deadline; None means the store's usual time limit.
"""

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nagara.store.budget import ByteBudget
from nagara.store.chunked import Assembly, find_chunk_list
from nagara.store.documents import parse_json
from nagara.store.errors import (
    AbsentError,
    BadNameError,
    CorruptError,
    FullError,
    UnavailableError,
)
from nagara.store.flights import Flights, claimed, patience_s
from nagara.store.hashing import Hashed, hash_file
from nagara.store.local import LocalTier, full_disk_named
from nagara.store.names import ObjectName, parse_chunk_list
from nagara.store.passing import PassingBy, PassingReader
from nagara.store.proving import ChunkProof
from nagara.store.reader import AssemblyReader, FileReader, ProvingReader, Reader
from nagara.store.sink import FileSink
from nagara.store.statistics import TierReport
from nagara.store.tier import Tier
from nagara.store.transfer import Transfer
from nagara.store.zone import ZoneTiers

_log = logging.getLogger(__name__)
DEFAULT_BUDGET_BYTES = 256 << 20
_ASSEMBLIES_OPEN = 64
_CHUNK_THREADS = 8


class Store:
    """A tenant's local tier and the remote ones behind it.

    Args:
        tiers: nearest first.
        budget: bounds the bytes in memory of all transfers; may be shared by stores.
        time_limit_s: how long one call may take when its caller gives no deadline.
        zone: caches that may come and go; nearer than `tiers`.
    """

    def __init__(
        self,
        local: LocalTier,
        tiers: Sequence[Tier] = (),
        *,
        budget: ByteBudget | None = None,
        time_limit_s: float = 60.0,
        zone: ZoneTiers | None = None,
    ) -> None:
        self.local = local
        self.transfer = Transfer(tiers, budget or ByteBudget(DEFAULT_BUDGET_BYTES), zone)
        self.time_limit_s = time_limit_s
        self._flights = Flights()
        self._passing = PassingBy(self.transfer)
        self._chunk_pool = ThreadPoolExecutor(_CHUNK_THREADS, "chunk")
        self._assemblies: OrderedDict[ObjectName, Assembly] = OrderedDict()
        self._proofs: OrderedDict[ObjectName, ChunkProof] = OrderedDict()
        self._lock = threading.Lock()

    def ensure(
        self,
        name: ObjectName,
        deadline_s: float | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Returns when the whole object is in the local folder; it was then verified once.

        Args:
            arrived: told the bytes of each chunk of a large object as it comes.

        Raises:
            FullError: there is no room for it.
            StoreError: it cannot be had.
        """
        if not self.local.has(name):
            self._fetch(name, self.deadline(deadline_s), arrived)

    def open(self, name: ObjectName, deadline_s: float | None = None) -> Reader:
        """A reader; small objects are fetched and proven first, large ones as they are read.

        Raises `StoreError` when a small object cannot be had.
        """
        deadline_s = self.deadline(deadline_s)
        for _ in range(3):  # an eviction may come between fetching and opening
            if name.is_chunked and (proof := self._proof(name)) is not None:
                return ProvingReader(proof, lambda until_s: self.open(name, until_s))
            if (descriptor := self.local.open(name)) is not None:
                return FileReader(descriptor)
            try:
                if name.is_chunked:
                    return AssemblyReader(self._assembly(name, deadline_s), self._passing)
                self._fetch(name, deadline_s, None)
            except FullError:
                _log.debug("%s passes the full disk by", name)
                return PassingReader(self._passing, name)
        return PassingReader(self._passing, name)

    def open_here(self, name: ObjectName) -> Reader | None:
        """A reader without asking any network; None when the whole object is not here."""
        descriptor = self.local.open(name)
        return None if descriptor is None else FileReader(descriptor)

    def read(self, name: ObjectName, deadline_s: float | None = None) -> bytes:
        """The whole content; for documents and small objects."""
        data = bytearray(name.size)
        reader = self.open(name, deadline_s)
        try:
            reader.read_into(memoryview(data), 0, self.deadline(deadline_s))
        finally:
            reader.close()
        return bytes(data)

    def put_bytes(self, content: bytes) -> ObjectName:
        """Adds an object from memory."""
        with self.local.temporary() as path:
            path.write_bytes(content)
            return self.put_temporary(path)

    def put_temporary(self, path: Path) -> ObjectName:
        """Makes a file inside `local.temporary()` an object."""
        hashed = self.named(path)
        self.add_hashed(path, hashed.name, hashed.chunk_list)
        return hashed.name

    def named(self, path: Path) -> Hashed:
        """What the content of a file is called."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            return hash_file(descriptor, size, self.local.folder.hashers)
        finally:
            os.close(descriptor)

    def add_hashed(self, path: Path, name: ObjectName, chunk_list: bytes | None) -> None:
        """Takes a temporary file whose hash the caller computed while writing it."""
        if self.local.has(name):
            self.local.folder.ledger.use(self.local.tenant, str(name))
            return
        self.local.folder.make_room(path.stat().st_blocks * 512)
        self.local.adopt(path, name, chunk_list)

    def document(self, key: str, limit_bytes: int, deadline_s: float | None = None) -> Any:
        """A JSON document from the tiers. Raises `CorruptError` when it is none."""
        raw = self.transfer.document(key, limit_bytes, self.deadline(deadline_s))
        try:
            return parse_json(raw)
        except ValueError as error:
            raise CorruptError(f"{key} is no JSON: {error}") from error

    def reports(self) -> list[TierReport]:
        """Every tier's figures, nearest first."""
        own = self.local.statistics.report()
        return [own, *(tier.statistics.report() for tier in self.transfer.tiers)]

    def close(self) -> None:
        """Ends threads and connections; the folder belongs to the caller."""
        self._chunk_pool.shutdown(cancel_futures=True)
        self.transfer.close()
        with self._lock:
            for assembly in self._assemblies.values():
                assembly.close()
            self._assemblies.clear()
            for proof in self._proofs.values():
                proof.close()
            self._proofs.clear()

    def deadline(self, deadline_s: float | None) -> float:
        """The given one, or the store's usual limit from now."""
        return time.monotonic() + self.time_limit_s if deadline_s is None else deadline_s

    def _proof(self, name: ObjectName) -> ChunkProof | None:
        """For a large object that is here with its chunk list and that nobody has proven."""
        with self._lock:
            known = self._proofs.get(name)
            if known is not None and known.is_open:
                self._proofs.move_to_end(name)
                return known
            self._proofs.pop(name, None)
        if (descriptor := self.local.open_unproven(name)) is None:
            return None
        try:
            chunks = parse_chunk_list(self.local.list_path(name).read_bytes(), name)
        except (OSError, BadNameError):  # then only all of it can tell
            os.close(descriptor)
            return None
        with self._lock:
            proof = self._proofs.setdefault(name, ChunkProof(self.local, name, descriptor, chunks))
            while len(self._proofs) > _ASSEMBLIES_OPEN:
                self._proofs.popitem(last=False)
            return proof

    def _fetch(
        self, name: ObjectName, deadline_s: float, arrived: Callable[[int], None] | None
    ) -> None:
        if not self.transfer.tiers:
            raise AbsentError("it is not here, and there is no other tier", where=str(name))

        def work() -> None:
            if name.is_chunked:
                self._assembly(name, deadline_s).complete(self._chunk_pool, deadline_s, arrived)
                with self._lock:
                    self._assemblies.pop(name, None)
            else:
                self._fetch_whole(name, deadline_s)

        self._flights.run(name, work, deadline_s)

    def _fetch_whole(self, name: ObjectName, deadline_s: float) -> None:
        path = self.local.partial / str(name)
        with ExitStack() as stack:
            stack.enter_context(full_disk_named(path))
            try:
                descriptor = stack.enter_context(claimed(path, patience_s(deadline_s)))
            except UnavailableError:  # twice is better than never
                path = stack.enter_context(self.local.temporary())
                descriptor = stack.enter_context(path.open("r+b")).fileno()
            if self.local.has(name):  # by another process, while we waited
                path.unlink(missing_ok=True)
                return
            try:
                self.local.folder.make_room(name.size)
                os.ftruncate(descriptor, 0)
                source = self.transfer.whole(name, FileSink(descriptor), deadline_s)
            except BaseException as error:
                path.unlink(missing_ok=True)
                if isinstance(error, OSError):
                    self.local.folder.relieve(name.size)
                raise
            self.local.adopt(path, name, None)
        self.transfer.promote(name, source, self.local.path(name))

    def _known_assembly(self, name: ObjectName) -> Assembly | None:
        """One under way; not one that became an object which has been evicted since: who reads from
        that goes on, and who wants the object begins anew."""
        known = self._assemblies.get(name)
        if known is None or (known.is_object and not self.local.has(name)):
            return None
        self._assemblies.move_to_end(name)
        return known

    def _assembly(self, name: ObjectName, deadline_s: float) -> Assembly:
        with self._lock:
            if (known := self._known_assembly(name)) is not None:
                return known
        chunks = find_chunk_list(self.local, self.transfer, name, deadline_s)
        with self._lock:
            if (known := self._known_assembly(name)) is not None:
                return known
            assembly = Assembly(self.local, self.transfer, name, chunks)
            if self.local.has(name):  # finished elsewhere between the look and the opening
                with contextlib.suppress(FileNotFoundError):
                    (self.local.partial / str(name)).unlink()
            self._assemblies[name] = assembly
            while len(self._assemblies) > _ASSEMBLIES_OPEN:
                self._assemblies.popitem(last=False)
            return assembly
