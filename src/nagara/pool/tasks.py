"""The root of each of the pool's tasks: one failure does not end the pool."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from nagara.base.errors import NagaraError

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, bool | None]]  # False: there was nothing to do


async def guarded(work: Work) -> bool:
    """Runs it; a failure is logged. Whether it did its work."""
    try:
        return await work() is not False
    except NagaraError as error:
        _log.warning("%s", error)
    except Exception:  # noqa: BLE001  # a task's root
        _log.exception("a task of the pool failed")
    return False


async def for_all(work: Callable[[str], Coroutine[Any, Any, None]], names: Iterable[str]) -> None:
    """For all at once: one that hangs must not hold up the others."""
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(guarded(partial(work, name)), name=f"{work.__name__} {name}")
