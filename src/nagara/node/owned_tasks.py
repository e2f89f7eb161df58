"""Waiting for work that must come to its end whoever stops waiting for it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Other = TypeVar("Other")
Arguments = ParamSpec("Arguments")


async def finished(task: asyncio.Task[Result]) -> Result:
    """The task's result. A cancellation meanwhile is raised too, but only when it has ended.

    The task itself must be bounded in time.
    """
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # seen; the interruption is what the waiter must hear of
    raise interruption


async def in_thread(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Carries out a bounded, blocking function in a worker thread, to its end.

    A thread cannot be cancelled. Whoever undoes what the function does must not begin before
    it has ended, and therefore a cancellation waits too.
    """
    return await finished(asyncio.create_task(asyncio.to_thread(function, *args, **kwargs)))


async def both(
    one: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, Other]
) -> tuple[Result, Other]:
    """Two at the same time, to their ends; then the first one's error, or the other's."""
    first, second = await asyncio.gather(one, other, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


class Leisure:
    """Work that nobody waits for, until its owner ends. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()

    def begin(self, work: Callable[[], None], after_s: float = 0.0) -> None:
        """Carries it out in a worker thread, after a while, or when its owner ends; it must be
        bounded and see to its own errors."""
        task = asyncio.create_task(self._later(work, after_s), name="work at leisure")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, work: Callable[[], None], after_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), after_s)
        await in_thread(work)

    async def ended(self) -> None:
        """All that was begun is done."""
        self._ending.set()
        await asyncio.gather(*self._tasks)
