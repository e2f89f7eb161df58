"""Carries tokens from the step thread into an asyncio loop, one wake-up for each step.

`post` is called on the step thread for each token, `flush` once after each step; the queues are
read in the loop.
"""

import asyncio
import contextlib
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
