"""Reading everything again, slowly, past the page cache: what finds a disk's rot.

A pass goes through one tenant's objects in the order of their names and remembers how far it is,
so that it goes on there after a restart. Its pace follows from how long a pass may take. Called
from one thread.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nagara.store.errors import CorruptError
from nagara.store.hashing import hash_range
from nagara.store.local import LocalTier
from nagara.store.names import CHUNK_BYTES, ChunkList, ObjectName, parse_name

_STATE_NAME = "scrub.json"
_SAVED_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What a pass, or the part of one since the start of this process, has read."""

    objects: int = 0
    bytes: int = 0
    wrong: tuple[str, ...] = ()
    is_whole: bool = False  # the end was reached


class Scrub:
    """One tenant's objects, read again and again.

    Args:
        bytes_per_s: not faster than this; None is as fast as it goes.
        wait: pauses so many seconds; true when it was told to stop meanwhile.
    """

    def __init__(
        self,
        local: LocalTier,
        bytes_per_s: float | None,
        wait: Callable[[float], bool],
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._bytes_per_s = bytes_per_s
        self._wait = wait
        self._monotonic_s = monotonic_s
        self._state = local.root / _STATE_NAME
        self._is_stopped = False
        self._saved_s = monotonic_s()

    def run_pass(self) -> Scrubbed:
        """Goes on with a pass to its end, or until it is told to stop.

        Objects that are wrong are removed: whoever needs one gets it from a tier again.
        """
        done = Scrubbed()
        for name in self._names(self._read_state()):
            is_right = self._check(name)
            if self._is_stopped:
                return done  # the object at hand comes again
            if is_right is None:
                continue
            wrong = done.wrong if is_right else (*done.wrong, str(name))
            done = replace(
                done, objects=done.objects + 1, bytes=done.bytes + name.size, wrong=wrong
            )
            if self._monotonic_s() - self._saved_s > _SAVED_EVERY_S:
                self._write_state(str(name))
        self._write_state("")
        return replace(done, is_whole=True)

    def _names(self, after: str) -> Iterator[ObjectName]:
        for text, _, _ in self._local.folder.ledger.names(self._local.tenant, after):
            yield parse_name(text)

    def _check(self, name: ObjectName) -> bool | None:
        """Whether the object is right; None when there is none."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = self._local.open_past_cache(name)
            try:
                is_right = self._is_right(name, descriptor)
            finally:
                os.close(descriptor)
            if not is_right and not self._is_stopped:
                self._local.statistics.fault()
                self._local.discard(name)
            return is_right
        return None

    def _is_right(self, name: ObjectName, descriptor: int) -> bool:
        if os.fstat(descriptor).st_size != name.size:
            return False
        hashes = []
        step = CHUNK_BYTES if name.is_chunked else max(name.size, 1)
        try:
            for start in range(0, max(name.size, 1), step):
                length = min(step, name.size - start)
                hashes.append(hash_range(descriptor, start, length))
                self._pace(length)
                if self._is_stopped:
                    return True
        except CorruptError:
            return False
        digest = ChunkList(hashes, name.size).name.digest if name.is_chunked else hashes[0]
        return digest == name.digest

    def _pace(self, size: int) -> None:
        pause_s = size / self._bytes_per_s if self._bytes_per_s else 0.0
        self._is_stopped = self._wait(pause_s) or self._is_stopped

    def _read_state(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._state.read_bytes())["after"])
        return ""

    def _write_state(self, after: str) -> None:
        making = self._state.with_name(f".{_STATE_NAME}")
        making.write_text(json.dumps({"after": after}))
        making.rename(self._state)
        self._saved_s = self._monotonic_s()


def pace_for(local: LocalTier, within_s: float) -> float:
    """Bytes a second at which all of a tenant's objects are read within that time."""
    _, space = local.folder.ledger.count(local.tenant)
    return max(space / within_s, 1.0)


def stopping(event: threading.Event) -> Callable[[float], bool]:
    """A `wait` that ends early when the event is set."""
    return lambda pause_s: event.wait(pause_s) if pause_s else event.is_set()
