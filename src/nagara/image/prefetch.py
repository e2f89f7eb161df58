"""Fetching ahead of need: traces first, packs where there are some, then whole lists.

Many at a time, under the store's one byte budget and the same single flights as readers: what a
reader wants meanwhile is not fetched twice. Nothing here is needed for correctness; what fails is
noted and left to the reader. One thread per job, and a pool; called from any thread.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.recorder import touched_bytes
from nagara.image.trace import Pack, Trace, touches_of
from nagara.store.budget import ByteBudget
from nagara.store.errors import CorruptError, StoreError
from nagara.store.names import CHUNK_BYTES, ObjectName
from nagara.store.roots import read_list
from nagara.store.store import Store
from nagara.store.transfer import PIECE_BYTES

_log = logging.getLogger(__name__)
AT_ONCE = 32
_PATIENCE_S = 300.0
# What fills an image at leisure: two threads, once no reader had to wait for so long.
_AT_LEISURE, _QUIET_S, _STARVED_S, _NICE = 2, 3.0, 10.0, 15
# What a start waits for: few and long reads. Its pace is known after a moment.
_GATHERING, _PACE_S = 8, 0.5
# What comes so soon comes while the tool that puts a process back begins.
_HEAD_START_S = 0.12
# Little more than the line holds is asked for at a time: what is needed first then comes first.
# A line of 250 MB/s, twice; and something to work on where there is no distance.
_LINE_BYTES_S = 500e6
_LEAST_BYTES = 16 << 20
# A pack is worth its bytes when at least this share of it is missing here.
_WORTH = 0.4


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is.

    `left` counts objects, and single chunks of large ones; `left_bytes` is known of what is
    gathered alone; `error` is the first one.
    """

    objects: int = 0
    bytes: int = 0
    left: int = 0
    error: str | None = None
    is_running: bool = False
    left_bytes: int = 0


_Work = tuple[int, Callable[[], None]]  # so many bytes, and what fetches them


class _Job:
    """One job's progress. Called from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = Progress(is_running=True)
        self.begun_s = time.monotonic()
        self.has_almost_come = threading.Event()  # at its pace so far, or ended
        self.is_awaited = False
        self._lock = threading.Lock()

    def add(
        self,
        *,
        objects: int = 0,
        size: int = 0,
        left: int = 0,
        left_bytes: int = 0,
        error: str | None = None,
    ) -> None:
        with self._lock:
            now = self.progress
            self.progress = replace(
                now,
                objects=now.objects + objects,
                bytes=now.bytes + size,
                left=now.left + left,
                left_bytes=now.left_bytes + left_bytes,
                error=now.error or error,
            )
            if left_bytes < 0 and self.needs_s() <= _HEAD_START_S:
                self.has_almost_come.set()

    def needs_s(self) -> float:
        """How long what is left takes at the pace so far."""
        now, elapsed_s = self.progress, time.monotonic() - self.begun_s
        return now.left_bytes * elapsed_s / max(1, now.bytes)

    def end(self) -> None:
        with self._lock:
            self.progress = replace(self.progress, is_running=False)
        self.has_almost_come.set()


class Prefetcher:
    """The jobs of one daemon, by name until that is forgotten; the latest of each is shown."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, _Job] = {}

    def start_trace(
        self, name: str, load: Callable[[], Trace], distance_s: float | None = None
    ) -> None:
        """Begins to fetch what a trace names, in its order.

        Args:
            load: gives the trace; called by the job, so that nobody waits for its parsing.
            distance_s: how long the tiers take to begin an answer, if that is known.
        """
        gate = ByteBudget(at_once_bytes(distance_s))
        self._begin(name, lambda job: self._fetch_trace(job, load(), gate))

    def start_fill(
        self,
        name: str,
        list_name: ObjectName,
        first: Sequence[ObjectName] = (),
        quiet_s: Callable[[], float] | None = None,
    ) -> None:
        """Begins to fetch everything a list names; then checks it for the local data layer.

        Args:
            first: the order to fetch in, as far as it matters (weights in the order of files).
            quiet_s: how long no reader had to wait. Given, the fetching keeps out of readers' way:
                nobody waits for its end.
        """
        self._begin(name, lambda job: self._fill(job, list_name, first, quiet_s))

    def start_gather(self, name: str, wanted: Trace, distance_s: float | None = None) -> None:
        """Begins to fetch what a trace names, in its order: who asked waits for all of it.

        Args:
            distance_s: as with `start_trace`.
        """
        gate = ByteBudget(at_once_bytes(distance_s))
        self._begin(name, lambda job: self._gather(job, wanted, gate))

    def gathered(self, name: str, limit_s: float) -> Progress:
        """Waits for the end of a job, or until that is a moment away; not at all if at its pace so
        far it would not end within `limit_s` from now."""
        job = self._jobs.get(name)
        if job is None:
            return Progress()
        until_s = time.monotonic() + limit_s
        job.is_awaited = limit_s > 0
        while not job.has_almost_come.wait(min(_PACE_S, max(0.0, until_s - time.monotonic()))):
            now_s = time.monotonic()
            if now_s >= until_s or job.needs_s() > until_s - now_s:
                job.is_awaited = False
                break
        return job.progress

    def progress(self, name: str) -> Progress:
        """Of a job; all zeros for an unknown one."""
        job = self._jobs.get(name)
        return Progress() if job is None else job.progress

    def forget(self, name: str) -> None:
        """Nobody will ask for the progress any more; what is under way goes on."""
        self._jobs.pop(name, None)

    def _fetch_trace(self, job: _Job, trace: Trace, gate: ByteBudget) -> None:
        """Fetches what a trace names; returns when all was tried."""
        has = self._store.local.has
        missing = {each for each in dict(trace.objects) if not has(each)}
        touches = [(each, chunk) for each, chunk in touches_of(trace) if each in missing]
        with ThreadPoolExecutor(AT_ONCE, "prefetch") as pool:
            packed: set[ObjectName] = set()
            work: list[_Work] = []
            for pack in trace.packs:
                wanted = {member for member, _ in pack.members} & missing
                if sum(each.size for each in wanted) >= _WORTH * pack.name.size:
                    packed |= wanted
                    work += self._pack_work(job, pack, wanted)
            job.add(left=len(touches))
            counted: set[ObjectName] = set()
            for each, chunk in touches:
                if each.is_chunked:
                    fetch = partial(self._chunk, job, each, chunk, is_new=each not in counted)
                    work.append((CHUNK_BYTES, fetch))
                    counted.add(each)
                elif each not in packed:
                    work.append((each.size, partial(self._one, job, each)))
            for begun in [self._begin_one(pool, gate, *each) for each in work]:
                begun.result()
            # What a pack did not bring (it failed, or was cut) comes singly.
            list(pool.map(lambda each: self._one(job, each), packed))

    def _gather(self, job: _Job, wanted: Trace, gate: ByteBudget) -> None:
        """Fetches what a trace names; returns when all was tried."""
        touches = list(touches_of(wanted))
        counts = Counter(each for each, _ in touches)
        sizes = list(map(touched_bytes, touches))
        job.add(left=len(touches), left_bytes=sum(sizes))

        def one(name: ObjectName, chunk: int, size: int) -> None:
            if name.is_chunked:  # what is complete before it is read is read past us
                is_cached = job.is_awaited and counts[name] == name.chunk_count
                self._chunk(job, name, chunk, is_new=chunk == 0, is_cached=is_cached)
            else:
                self._one(job, name)
            job.add(left_bytes=-size)

        with ThreadPoolExecutor(_GATHERING, "gather") as pool:
            begun = [
                self._begin_one(pool, gate, size, partial(one, *touch, size))
                for touch, size in zip(touches, sizes, strict=True)
            ]
            for each in begun:
                each.result()

    def _fill(
        self,
        job: _Job,
        list_name: ObjectName,
        first: Sequence[ObjectName],
        quiet_s: Callable[[], float] | None,
    ) -> None:
        """Fetches a whole list, proves it, and records that it is complete for this boot."""
        store = self._store
        listed = dict.fromkeys([*read_list(store, list_name), list_name])
        names = list(dict.fromkeys([*(each for each in first if each in listed), *listed]))
        job.add(left=len(names))

        def one(each: ObjectName) -> None:
            if quiet_s is not None and not store.local.has(each):
                _until_quiet(quiet_s)
            self._one(job, each)

        threads, ready = (AT_ONCE, None) if quiet_s is None else (_AT_LEISURE, _be_nice)
        with ThreadPoolExecutor(threads, "fill", ready) as pool:
            list(pool.map(one, names))
        if job.progress.error is None:
            check_complete(store, list_name, names)

    def _begin(self, name: str, work: Callable[[_Job], None]) -> None:
        job = self._jobs[name] = _Job(name)

        def run() -> None:
            try:
                work(job)
            except (NagaraError, OSError) as error:
                _log.warning("prefetching for %s ended: %s", name, error)
                job.add(error=str(error))
            finally:
                job.end()

        threading.Thread(target=run, name=f"prefetch {name}", daemon=True).start()

    @staticmethod
    def _begin_one(
        pool: ThreadPoolExecutor, gate: ByteBudget, size: int, work: Callable[[], None]
    ) -> Future[None]:
        """Begins work when so many bytes may be under way: one after the other, in order."""
        with ExitStack() as stack:
            stack.enter_context(gate.held(size, _deadline()))
            passed = stack.pop_all()

        def run() -> None:
            with passed:
                work()

        return pool.submit(run)

    def _pack_work(self, job: _Job, pack: Pack, wanted: set[ObjectName]) -> list[_Work]:
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

    def _stretch(self, job: _Job, pack: Pack, members: tuple[tuple[ObjectName, int], ...]) -> _Work:
        start = members[0][1]
        end = members[-1][1] + members[-1][0].size

        def read() -> None:
            def take(data: memoryview) -> None:
                found = [(name, data[at - start : at - start + name.size]) for name, at in members]
                self._keep(job, found)

            try:
                self._store.transfer.range(pack.name, start, end - start, _deadline(), take)
            except (StoreError, OSError) as error:
                _log.info("a pack was of no use: %s", error)

        return end - start, read

    def _keep(self, job: _Job, members: Sequence[tuple[ObjectName, memoryview]]) -> None:
        local = self._store.local
        right = []
        for name, content in members:
            if hashlib.sha256(content).digest() != name.digest:
                raise CorruptError("a pack's member is wrong", where=str(name))
            if not local.has(name):
                right.append((name, content))
        local.keep(right)
        job.add(objects=len(right), size=sum(name.size for name, _ in right))

    def _one(self, job: _Job, name: ObjectName) -> None:
        """A whole object."""
        store = self._store

        def fetch() -> None:
            if not store.local.has(name):
                store.ensure(name, _deadline())
                job.add(objects=1, size=name.size)

        self._tried(job, fetch)

    def _chunk(
        self, job: _Job, name: ObjectName, index: int, *, is_new: bool, is_cached: bool = False
    ) -> None:
        """A chunk of a large object; `is_new`: the first of it; `is_cached`: its file will be
        read itself."""

        def fetch() -> None:
            start = index * CHUNK_BYTES
            reader = self._store.open(name, _deadline())
            if not reader.is_here(start, 1):
                reader.need(start, 1, _deadline(), is_cached=is_cached)
                job.add(objects=int(is_new), size=min(CHUNK_BYTES, name.size - start))

        self._tried(job, fetch)

    def _tried(self, job: _Job, fetch: Callable[[], None]) -> None:
        """`left` goes down whatever becomes of it."""
        try:
            fetch()
        except (StoreError, OSError) as error:
            job.add(error=str(error))
        finally:
            job.add(left=-1)


def _until_quiet(quiet_s: Callable[[], float]) -> None:
    """Returns when no reader has waited for a moment; a little work is done all the same."""
    until_s = time.monotonic() + _STARVED_S
    while (left_s := _QUIET_S - quiet_s()) > 0 and time.monotonic() < until_s:
        time.sleep(min(left_s, max(0.0, until_s - time.monotonic())))


def _be_nice() -> None:
    """This thread alone: others' readers come first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


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


def at_once_bytes(distance_s: float | None) -> int:
    """How much of a trace may be under way from so far away; None: nobody knows how far."""
    most = AT_ONCE * PIECE_BYTES
    if distance_s is None:
        return most
    return min(most, _LEAST_BYTES + int(distance_s * _LINE_BYTES_S))


def _deadline() -> float:
    return time.monotonic() + _PATIENCE_S
