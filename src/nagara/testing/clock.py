"""A clock that stands still until a test moves it."""

import asyncio
import heapq
import itertools

_THREADS_MS = 500  # then a thread counts as one that waits for something itself


class JumpingClock:
    """A `Clock` whose time passes only in `advance` and `jump_wall`.

    `advance` wakes sleepers in the order of their deadlines and lets the loop run between them,
    so that loops of the code under test see every tick they asked for.
    """

    def __init__(self, wall_s: float = 1_700_000_000.0, monotonic_s: float = 1000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return self._wall_s

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point."""
        return self._monotonic_s

    async def sleep(self, seconds: float) -> None:
        """Returns when the clock has been moved `seconds` on."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic_s + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Moves both readings on by `seconds`."""
        target_s = self._monotonic_s + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            deadline_s, _, future = heapq.heappop(self._sleepers)
            self._move_to(deadline_s)
            if not future.done():
                future.set_result(None)
                await self._settle()
        self._move_to(target_s)
        await self._settle()

    async def leap(self, seconds: float) -> None:
        """Both readings go on, and nothing runs meanwhile, as while a host is suspended.

        As with the system's own, who sleeps does so for time in which the host is awake.
        """
        self._move_to(self._monotonic_s + seconds)
        self._sleepers = [(at_s + seconds, n, one) for at_s, n, one in self._sleepers]
        await self._settle()

    def jump_wall(self, seconds: float) -> None:
        """Sets the wall clock forward or back, as a time server does; monotonic time stays."""
        self._wall_s += seconds

    def _move_to(self, monotonic_s: float) -> None:
        passed_s = max(0.0, monotonic_s - self._monotonic_s)
        self._monotonic_s += passed_s
        self._wall_s += passed_s

    async def _settle(self) -> None:
        """Lets every task run that can, and threads and sockets answer what they have begun."""
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        for _ in range(_THREADS_MS):
            if not _threads_are_working():
                return
            await asyncio.sleep(0.001)


def _threads_are_working() -> bool:
    """Whether a task waits for what a thread does: known by what asyncio hangs on its future."""
    for task in asyncio.all_tasks():
        waited_for = getattr(task, "_fut_waiter", None)
        for callback, _ in getattr(waited_for, "_callbacks", None) or ():
            if getattr(callback, "__qualname__", "").startswith("_chain_future"):
                return True
    return False
