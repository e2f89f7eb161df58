"""Fetching ahead of need: traces first, packs where there are some, then whole lists.

Many at a time, under the store's one byte budget and the same single flights as readers: what a
reader wants meanwhile is not fetched twice. Nothing here is needed for correctness; what fails is
noted and left to the reader. One thread per job, and a pool; called from any thread.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.trace import Pack, Trace, touches_of
from nagara.store.errors import CorruptError, StoreError
from nagara.store.names import CHUNK_BYTES, ObjectName
from nagara.store.roots import read_list
from nagara.store.store import Store
from nagara.store.transfer import PIECE_BYTES

_log = logging.getLogger(__name__)
AT_ONCE = 32
_PATIENCE_S = 300.0
# A pack is worth its bytes when at least this share of it is missing here.
_WORTH = 0.4


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is.

    `left` counts objects, and single chunks of large ones; `error` is the first one.
    """

    objects: int = 0
    bytes: int = 0
    left: int = 0
    error: str | None = None


class Prefetcher:
    """The jobs of one daemon, by name. A new job of a name replaces the old one's progress."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}

    def start_trace(self, name: str, trace: Trace) -> None:
        """Begins to fetch what a trace names, in its order."""
        self._begin(name, lambda: self.fetch_trace(name, trace))

    def start_fill(
        self, name: str, list_name: ObjectName, first: Sequence[ObjectName] = ()
    ) -> None:
        """Begins to fetch everything a list names; then checks it for the local data layer.

        Args:
            first: the order to fetch in, as far as it matters (weights in the order of files).
        """
        self._begin(name, lambda: self.fill(name, list_name, first))

    def progress(self, name: str) -> Progress:
        """Of a job; all zeros for an unknown one."""
        with self._lock:
            return self._progress.get(name, Progress())

    def fetch_trace(self, name: str, trace: Trace) -> None:
        """Fetches what a trace names; returns when all was tried."""
        has = self._store.local.has
        missing = {each for each in dict(trace.objects) if not has(each)}
        touches = [(each, chunk) for each, chunk in touches_of(trace) if each in missing]
        with ThreadPoolExecutor(AT_ONCE, "prefetch") as pool:
            packed: set[ObjectName] = set()
            pieces: list[Callable[[], None]] = []
            for pack in trace.packs:
                wanted = {member for member, _ in pack.members} & missing
                if sum(each.size for each in wanted) >= _WORTH * pack.name.size:
                    packed |= wanted
                    pieces += self._pack_work(name, pack, wanted)
            self._add(name, left=len(touches))
            first = [pool.submit(piece) for piece in pieces]
            counted: set[ObjectName] = set()
            for each, chunk in touches:
                if each.is_chunked:
                    is_new = each not in counted
                    counted.add(each)
                    first.append(pool.submit(self._chunk, name, each, chunk, is_new=is_new))
                elif each not in packed:
                    first.append(pool.submit(self._one, name, each))
            for job in first:
                job.result()
            # What a pack did not bring (it failed, or was cut) comes singly.
            for job in [pool.submit(self._one, name, each) for each in packed]:
                job.result()

    def fill(self, name: str, list_name: ObjectName, first: Sequence[ObjectName] = ()) -> None:
        """Fetches a whole list, proves it, and records that it is complete for this boot."""
        store = self._store
        listed = dict.fromkeys([*read_list(store, list_name), list_name])
        names = list(dict.fromkeys([*(each for each in first if each in listed), *listed]))
        self._add(name, left=len(names))
        with ThreadPoolExecutor(AT_ONCE, "fill") as pool:
            list(pool.map(lambda each: self._one(name, each), names))
        if self.progress(name).error is None:
            check_complete(store, list_name, names)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._progress[name] = Progress()

        def run() -> None:
            try:
                work()
            except (NagaraError, OSError) as error:
                _log.warning("prefetching for %s ended: %s", name, error)
                self._add(name, error=str(error))

        threading.Thread(target=run, name=f"prefetch {name}", daemon=True).start()

    def _pack_work(self, job: str, pack: Pack, wanted: set[ObjectName]) -> list[Callable[[], None]]:
        """Calls that each read one stretch of a pack and take the members out of it."""
        work = []
        stretch: list[tuple[ObjectName, int]] = []
        for member, offset in pack.members:
            if stretch and offset + member.size - stretch[0][1] > PIECE_BYTES:
                work.append(self._stretch(job, pack, tuple(stretch)))
                stretch = []
            if member in wanted:
                stretch.append((member, offset))
        if stretch:
            work.append(self._stretch(job, pack, tuple(stretch)))
        return work

    def _stretch(
        self, job: str, pack: Pack, members: tuple[tuple[ObjectName, int], ...]
    ) -> Callable[[], None]:
        def read() -> None:
            start = members[0][1]
            end = members[-1][1] + members[-1][0].size

            def take(data: memoryview) -> None:
                found = [(name, data[at - start : at - start + name.size]) for name, at in members]
                self._keep(job, found)

            try:
                self._store.transfer.range(pack.name, start, end - start, _deadline(), take)
            except (StoreError, OSError) as error:
                _log.info("a pack was of no use: %s", error)

        return read

    def _keep(self, job: str, members: Sequence[tuple[ObjectName, memoryview]]) -> None:
        local = self._store.local
        right = []
        for name, content in members:
            if hashlib.sha256(content).digest() != name.digest:
                raise CorruptError("a pack's member is wrong", where=str(name))
            if not local.has(name):
                right.append((name, content))
        local.keep(right)
        self._add(job, objects=len(right), size=sum(name.size for name, _ in right))

    def _one(self, job: str, name: ObjectName) -> None:
        """A whole object."""
        store = self._store

        def fetch() -> None:
            if not store.local.has(name):
                store.ensure(name, _deadline())
                self._add(job, objects=1, size=name.size)

        self._tried(job, fetch)

    def _chunk(self, job: str, name: ObjectName, index: int, *, is_new: bool) -> None:
        """A chunk of a large object; `is_new`: the first of it."""

        def fetch() -> None:
            start = index * CHUNK_BYTES
            reader = self._store.open(name, _deadline())
            if not reader.is_here(start, 1):
                reader.need(start, 1, _deadline())
                self._add(job, objects=int(is_new), size=min(CHUNK_BYTES, name.size - start))

        self._tried(job, fetch)

    def _tried(self, job: str, fetch: Callable[[], None]) -> None:
        """`left` goes down whatever becomes of it."""
        try:
            fetch()
        except (StoreError, OSError) as error:
            self._add(job, error=str(error))
        finally:
            self._add(job, left=-1)

    def _add(
        self,
        job: str,
        *,
        objects: int = 0,
        size: int = 0,
        left: int = 0,
        error: str | None = None,
    ) -> None:
        with self._lock:
            now = self._progress.get(job, Progress())
            self._progress[job] = replace(
                now,
                objects=now.objects + objects,
                bytes=now.bytes + size,
                left=now.left + left,
                error=now.error or error,
            )


def check_complete(store: Store, list_name: ObjectName, names: Iterable[ObjectName]) -> bool:
    """Proves every object of a pinned list and records it, for the local data layer.

    True when all of them are here as whole files and right.
    """
    local = store.local
    for name in names:
        if (reader := store.open_here(name)) is None:
            return False
        reader.close()
    local.folder.syncer.flush()
    local.folder.ledger.set_complete(local.tenant, str(list_name), boot_id())
    return True


def boot_id() -> str:
    """Changes with each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _deadline() -> float:
    return time.monotonic() + _PATIENCE_S
