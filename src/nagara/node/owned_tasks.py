"""Waiting for work that must come to its end whoever stops waiting for it."""

import asyncio
from typing import TypeVar

Result = TypeVar("Result")


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
