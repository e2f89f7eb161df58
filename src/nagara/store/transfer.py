"""Getting the bytes of one object from the remote tiers, nearest first, verified.

It knows the tiers, the byte budget and the pieces; where the bytes go is the caller's business.
Called from any thread; pieces of one object are read by a pool of threads.
"""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from nagara.store.budget import ByteBudget
from nagara.store.errors import (
    AbsentError,
    BadNameError,
    CorruptError,
    StoreError,
    UnavailableError,
)
from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName, list_bytes, parse_chunk_list
from nagara.store.piece_buffers import piece_buffer
from nagara.store.sink import Sink
from nagara.store.tier import Tier
from nagara.store.zone import ZoneTiers

_log = logging.getLogger(__name__)
PIECE_BYTES = CHUNK_BYTES
_PIECE_THREADS = 16
_HASHED_BYTES = 1 << 20
_TRIES_PER_TIER = 2  # an answer with wrong bytes is asked for once more
_DOWN_S = 3.0  # so long a tier that could not be asked is asked after the others
_PROMOTIONS = 1024


class Transfer:
    """The remote tiers of one tenant: the zone's caches, then those set by the owner."""

    def __init__(
        self, tiers: Sequence[Tier], budget: ByteBudget, zone: ZoneTiers | None = None
    ) -> None:
        self._own = tuple(tiers)
        self._zone = zone
        self.budget = budget
        self._pieces = ThreadPoolExecutor(_PIECE_THREADS, "piece")
        self._down_until_s: dict[Tier, float] = {}
        self._promotions: queue.Queue[tuple[Tier, str, Path] | None] = queue.Queue(_PROMOTIONS)
        self._promoter: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Nearest first, as they are at the moment."""
        return self._own if self._zone is None else (*self._zone.now(), *self._own)

    @property
    def zone_tier(self) -> Tier | None:
        """The nearest of the zone's caches, where what was made here is brought."""
        caches = () if self._zone is None else self._zone.now()
        return caches[0] if caches else None

    @property
    def is_zone_alone(self) -> bool:
        """All that comes from elsewhere comes from machines of the same cluster."""
        return self.zone_tier is not None and not self._own

    def whole(self, name: ObjectName, sink: Sink, deadline_s: float) -> Tier:
        """Reads an unchunked object into `sink`; returns which tier it came from.

        What a failed try wrote is overwritten by the next one.
        """

        def attempt(tier: Tier) -> None:
            if name.size <= PIECE_BYTES:
                with self._piece(tier, name, 0, name.size, deadline_s) as data:
                    _check(hashlib.sha256(data).digest(), name, tier)
                    sink.write(0, data)
            else:
                _check(self._pieced(tier, name, sink, deadline_s), name, tier)

        return self._from_nearest(name, attempt)

    def chunk(
        self, name: ObjectName, chunks: ChunkList, index: int, sink: Sink, deadline_s: float
    ) -> Tier:
        """Reads one chunk of a large object into `sink`."""
        start, length = index * CHUNK_BYTES, chunks.length(index)

        def attempt(tier: Tier) -> None:
            with self._piece(tier, name, start, length, deadline_s) as data:
                if hashlib.sha256(data).digest() != chunks.hashes[index]:
                    raise CorruptError(f"chunk {index} is wrong", where=f"{tier.name} {name}")
                sink.write(start, data)

        return self._from_nearest(name, attempt)

    def chunk_list(self, name: ObjectName, deadline_s: float) -> ChunkList:
        """The chunk list of a large object, proven by the name."""
        found: list[ChunkList] = []

        def attempt(tier: Tier) -> None:
            raw = tier.read(name.list_key, 0, list_bytes(name), deadline_s)
            try:
                found.append(parse_chunk_list(raw, name))
            except BadNameError as error:
                raise CorruptError(error.what, where=f"{tier.name} {name}") from error

        self._from_nearest(name, attempt)
        return found[0]

    def range(
        self,
        name: ObjectName,
        start: int,
        length: int,
        deadline_s: float,
        take: Callable[[memoryview], None],
    ) -> None:
        """Gives `take` unverified bytes of an object, which it proves by other means (packs).

        `take` raises `CorruptError` when they are wrong; the bytes are nobody's after it.
        """

        def attempt(tier: Tier) -> None:
            with self._piece(tier, name, start, length, deadline_s) as data:
                take(data)

        self._from_nearest(name, attempt)

    def document(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        """A named document from the nearest tier that has it."""
        found: list[bytes] = []
        self._from_nearest(
            key, lambda tier: found.append(tier.read_all(key, limit_bytes, deadline_s))
        )
        return found[0]

    def promote(self, name: ObjectName, source: Tier, path: Path) -> None:
        """Sends an object that came from the tier `source` to the nearer ones, later."""
        for tier in takewhile(lambda each: each is not source, self.tiers):
            if not tier.can_write:
                continue
            with self._lock:
                if self._promoter is None:
                    self._promoter = threading.Thread(
                        target=self._run_promotions, name="promote", daemon=True
                    )
                    self._promoter.start()
            try:
                self._promotions.put_nowait((tier, name.key, path))
            except queue.Full:
                _log.debug("not kept in %s: too much waits for it", tier.name)

    @property
    def distance_s(self) -> float | None:
        """How long the farthest tier takes to begin an answer; None where one is not known."""
        known = [tier.statistics.distance_s for tier in self.tiers]
        found = [each for each in known if each is not None]
        return max(found) if found and len(found) == len(known) else None

    def settle(self) -> None:
        """Returns when all promotions so far were tried."""
        if self._promoter is not None:
            self._promotions.join()

    def close(self) -> None:
        self._pieces.shutdown(cancel_futures=True)
        if self._promoter is not None:
            self._promotions.put(None)
            self._promoter.join()
        for tier in self._own:
            tier.close()
        if self._zone is not None:
            self._zone.close()

    @contextmanager
    def _piece(
        self, tier: Tier, name: ObjectName, start: int, length: int, deadline_s: float
    ) -> Iterator[memoryview]:
        """Bytes as a tier gives them, at most a chunk, until the `with` block ends."""
        with self.budget.held(length, deadline_s), piece_buffer(length) as data:
            tier.read_into(name.key, start, data, deadline_s)
            yield data

    def _pieced(self, tier: Tier, name: ObjectName, sink: Sink, deadline_s: float) -> bytes:
        """Reads an object by several threads; returns its hash, computed behind them."""

        def piece(start: int) -> None:
            length = min(PIECE_BYTES, name.size - start)
            with self._piece(tier, name, start, length, deadline_s) as data:
                sink.write(start, data)

        digest = hashlib.sha256()
        pending = [
            (start, self._pieces.submit(piece, start)) for start in range(0, name.size, PIECE_BYTES)
        ]
        try:
            for start, arriving in pending:
                arriving.result()
                for part in range(start, min(start + PIECE_BYTES, name.size), _HASHED_BYTES):
                    length = min(_HASHED_BYTES, name.size - part)
                    digest.update(sink.read(part, length))
        finally:
            for _, arriving in pending:
                arriving.cancel()
            wait(arriving for _, arriving in pending if not arriving.cancelled())
        return digest.digest()

    def _from_nearest(self, what: ObjectName | str, attempt: Callable[[Tier], None]) -> Tier:
        """Tries the tiers in order, those that were down just now last; returns the one."""
        now = time.monotonic()
        errors: list[StoreError] = []
        for tier in sorted(self.tiers, key=lambda each: self._down_until_s.get(each, 0.0) > now):
            for _ in range(_TRIES_PER_TIER):
                try:
                    attempt(tier)
                except CorruptError as error:
                    _log.warning("%s", error)
                    tier.statistics.fault()
                    errors.append(error)
                    continue
                except (AbsentError, UnavailableError) as error:
                    if isinstance(error, UnavailableError):
                        self._down_until_s[tier] = time.monotonic() + _DOWN_S
                    errors.append(error)
                    break
                return tier
        raise _worst(errors, what)

    def _run_promotions(self) -> None:
        while (job := self._promotions.get()) is not None:
            tier, key, path = job
            try:
                deadline_s = time.monotonic() + 60.0
                if not tier.has(key, deadline_s):
                    tier.write(key, path, deadline_s)
            except (StoreError, OSError) as error:
                _log.debug("not kept in %s: %s", tier.name, error)
            finally:
                self._promotions.task_done()


def _check(digest: bytes, name: ObjectName, tier: Tier) -> None:
    if digest != name.digest:
        raise CorruptError("the bytes are not the object's", where=f"{tier.name} {name}")


def _worst(errors: list[StoreError], what: ObjectName | str) -> StoreError:
    """The error that says most: somebody may have it > it is wrong everywhere > nobody has it."""
    for kind in (UnavailableError, CorruptError):
        for error in errors:
            if isinstance(error, kind):
                return error
    return AbsentError("no tier has it", where=str(what))
