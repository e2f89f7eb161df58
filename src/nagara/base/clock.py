"""Time as a constructor argument.

Two readings that must not be mixed: `wall_s` (seconds since the epoch; survives a snapshot, may
jump) for anything stored, and `monotonic_s` (never jumps; has no meaning outside this process)
for durations and deadlines.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What code that waits or measures asks for; `nagara.testing` ships one that jumps."""

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point, never going back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of this clock's own time."""
        ...


class SystemClock:
    """The machine's own clock."""

    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
