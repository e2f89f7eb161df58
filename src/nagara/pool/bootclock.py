"""A clock that counts suspension: leases and deadlines go on while a machine sleeps."""

import time

from nagara.base.clock import SystemClock


class BootClock(SystemClock):
    """`monotonic_s` is CLOCK_BOOTTIME: it never jumps, and does not stand still either."""

    def monotonic_s(self) -> float:
        """Seconds since the machine was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
