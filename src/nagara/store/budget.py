"""One bound for the bytes that all transfers of a process hold in memory at once."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from nagara.store.errors import UnavailableError


class ByteBudget:
    """A counting semaphore over bytes, first come first served. Called from any thread.

    First come first served, so that a large transfer is not starved by many small ones.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.most_bytes = 0  # the highest use so far, for tests and reports
        self._used = 0
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @contextmanager
    def held(self, size_bytes: int, deadline_s: float) -> Iterator[None]:
        """Holds `size_bytes` inside the `with` block; more than the limit counts as the limit.

        Raises `UnavailableError` when the deadline (monotonic seconds) passes first.
        """
        wanted = min(size_bytes, self.limit_bytes)
        self._take(wanted, deadline_s)
        try:
            yield
        finally:
            with self._changed:
                self._used -= wanted
                self._changed.notify_all()

    def _take(self, wanted: int, deadline_s: float) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            is_granted = self._changed.wait_for(
                lambda: self._queue[0] is ticket and self._used + wanted <= self.limit_bytes,
                max(0.0, deadline_s - time.monotonic()),
            )
            self._queue.remove(ticket)
            self._changed.notify_all()
            if not is_granted:
                raise UnavailableError("no memory for the transfer came free in time")
            self._used += wanted
            self.most_bytes = max(self.most_bytes, self._used)
