"""What mounted images touch, in order: the raw material of access traces. Called from any thread.

While nothing is recorded it costs one comparison a request.
"""

import threading
from collections.abc import Iterable

from nagara.store.names import CHUNK_BYTES, ObjectName

Touch = tuple[ObjectName, int]  # an object, and the chunk of it; 0 for small ones
_LIMIT = 1_000_000


def touched_bytes(touch: Touch) -> int:
    """Of a small object all of it, of a large one the chunk."""
    name, chunk = touch
    if not name.is_chunked:
        return name.size
    return min(CHUNK_BYTES, name.size - chunk * CHUNK_BYTES)


class Recorder:
    """Recordings under way, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, tuple[frozenset[ObjectName], dict[Touch, None]]] = {}

    def start(self, name: str, wanted: Iterable[ObjectName]) -> None:
        """From now on touches of `wanted` are kept; begins anew if it was running."""
        with self._lock:
            self._running = {**self._running, name: (frozenset(wanted), {})}

    def finish(self, name: str) -> list[Touch] | None:
        """What was touched, in order, each once; None when nothing was recorded."""
        with self._lock:
            running = dict(self._running)
            found = running.pop(name, None)
            self._running = running
        return list(found[1]) if found else None

    def open(self, name: ObjectName) -> None:
        """A small object was opened; a large one counts when it is read."""
        if self._running and not name.is_chunked:
            self._touch((name, 0))

    def read(self, name: ObjectName, offset: int) -> None:
        if self._running and name.is_chunked:
            self._touch((name, offset // CHUNK_BYTES))

    def _touch(self, touch: Touch) -> None:
        for wanted, touched in self._running.values():
            if touch[0] in wanted and len(touched) < _LIMIT:
                touched.setdefault(touch)
