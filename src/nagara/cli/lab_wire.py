"""A slow and leaky wire: `python -m nagara.cli.lab_wire ONE OTHER DELAY_S LOSS SEED`.

For kernels without the netem scheduler. It makes two tap devices of these names where it runs (a
network namespace of `lab_machines`, as root) and carries frames between them: each is delayed by
`DELAY_S`, and a share `LOSS` of them is dropped, chosen by a generator that begins with `SEED`.
Says `ready` when the devices are there; they are gone when it ends, with its standard input.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536
_QUEUE_FRAMES = 10_000  # what a long wire holds; more is dropped, as a router's buffer would


class Direction:
    """Frames on their way from one device to the other."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float, delay_s: float, is_lost: bool) -> None:
        """Reads one frame from the device."""
        frame = os.read(self.source, _FRAME_BYTES)
        if not is_lost and len(self._waiting) < _QUEUE_FRAMES:
            self._waiting.append((now_s + delay_s, frame))

    def deliver(self, now_s: float) -> float | None:
        """Writes what has arrived; returns when the next one does."""
        while self._waiting:
            due_s, frame = self._waiting[0]
            if due_s > now_s:
                return due_s
            self._waiting.popleft()
            try:
                os.write(self.target, frame)
            except OSError:  # the device is down: a frame into nothing
                continue
        return None


def open_tap(name: str) -> int:
    """A new tap device, which lives as long as the descriptor. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def main() -> int:
    one, other, delay, share, seed = sys.argv[1:]
    delay_s, loss = float(delay), float(share)
    chance = random.Random(int(seed))  # noqa: S311 - repeatable on purpose
    there, here = open_tap(one), open_tap(other)
    directions = {there: Direction(there, here), here: Direction(here, there)}
    print("ready", flush=True)
    while True:
        now_s = time.monotonic()
        due = [at for each in directions.values() if (at := each.deliver(now_s)) is not None]
        wait_s = max(0.0, min(due) - now_s) if due else None
        readable, _, _ = select.select([*directions, 0], [], [], wait_s)
        if 0 in readable:  # standard input: who started us is gone
            return 0
        for descriptor in readable:
            directions[descriptor].take(time.monotonic(), delay_s, chance.random() < loss)


if __name__ == "__main__":
    sys.exit(main())
