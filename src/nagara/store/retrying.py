"""How often, and how long apart, a remote tier is asked again. Pure but for the calls given.

Bounded three times: by attempts, by the deadline of who asked, and by what the server itself
asked for with Retry-After (a wait that does not fit into the deadline ends it at once).
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from nagara.store.errors import UnavailableError

T = TypeVar("T")


class RefusedError(UnavailableError):
    """The tier will answer the same next time: wrong token, no such method."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter below `longest_s`.

    Args:
        sleep: how to wait; a test gives its own.
        draw: a number in [0, 1).
    """

    attempts: int = 5
    first_s: float = 0.05
    longest_s: float = 2.0
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random
    monotonic_s: Callable[[], float] = field(default=time.monotonic)

    def run(self, ask: Callable[[], T], deadline_s: float) -> T:
        """The first answer that is no `UnavailableError`; the last such error at the bounds."""
        for attempt in range(self.attempts):
            try:
                return ask()
            except RefusedError:
                raise
            except UnavailableError as error:
                pause_s = self.first_s * 2**attempt * (0.5 + self.draw() / 2)
                pause_s = max(min(pause_s, self.longest_s), error.retry_after_s or 0.0)
                is_last = attempt + 1 == self.attempts
                if is_last or self.monotonic_s() + pause_s >= deadline_s:
                    raise
                self.sleep(pause_s)
        raise AssertionError("a policy makes at least one attempt")
