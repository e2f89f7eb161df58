"""Tasks with one owner: a `TaskGroup`, and a guard at the root of each.

A task's bug is logged with its trace and ends that task only; the group's other tasks go on.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError

RETRY_S = 2.0

_log = logging.getLogger(__name__)


class Tasks:
    """The tasks of one owner within a group."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        """Begins `work`.

        Takes a function, because a task cancelled before its first step would leave a coroutine
        that was never awaited.
        """
        task = self._group.create_task(_guarded(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def end(self) -> None:
        """Cancels all tasks and returns when they have ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _guarded(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    try:
        await work()
    except Exception:  # noqa: BLE001 - a task's root; the trace is logged
        _log.exception("task %r failed", name)


async def surely(call: Callable[[], Coroutine[Any, Any, None]], what: str, clock: Clock) -> None:
    """Calls again until it has worked: what depends on it, such as a slot, stays taken till then.

    Args:
        what: could not be done yet, for the log.
    """
    while True:
        try:
            await call()
        except NagaraError as error:
            _log.warning("%s: %s", what, error.what)
            await clock.sleep(RETRY_S)
        else:
            return
