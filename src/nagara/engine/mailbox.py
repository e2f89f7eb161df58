"""Carries tokens from the step thread to those who wait for them, one wake-up for each step.

`post` is called on the step thread for each token, `flush` once after each step. Waking a thread
for each token would make it and the step thread take the interpreter from each other all the time.
"""

import asyncio
import contextlib
import queue
from collections import deque

from nagara.engine.events import TokenEvent


class Mailbox:
    """All requests of one asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[asyncio.Queue[TokenEvent], TokenEvent]] = deque()

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended: nobody reads any more."""
        return self._loop.is_closed()

    def post(self, letters: "asyncio.Queue[TokenEvent]", event: TokenEvent) -> None:
        self._posted.append((letters, event))

    def flush(self) -> None:
        if self._posted:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._posted:
            letters, event = self._posted.popleft()
            letters.put_nowait(event)


class Letterbox:
    """All requests of one thread that waits for them, each with its number."""

    is_over = False

    def __init__(self) -> None:
        self._posted: list[tuple[int, TokenEvent]] = []
        self._delivered: queue.SimpleQueue[list[tuple[int, TokenEvent]]] = queue.SimpleQueue()

    def post(self, number: int, event: TokenEvent) -> None:
        self._posted.append((number, event))

    def flush(self) -> None:
        if self._posted:
            posted, self._posted = self._posted, []
            self._delivered.put(posted)

    def take(self) -> list[tuple[int, TokenEvent]]:
        """What has come since, at least one; waits for it."""
        return self._delivered.get()
