"""The channel over a socket instead of the kernel's device: each request is one datagram."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nagara.image import fuse_wire as wire
from nagara.image.fuse_channel import Answer, FuseChannel, Later

Handle = Callable[[wire.Request, float], "Answer | Later | None"]
_HEAD = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")


class Kernel:
    """The asking side."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(20)

    def ask(self, operation: int, unique: int, body: bytes = b"", pid: int = 0) -> None:
        head = _HEAD.pack(_HEAD.size + len(body), operation, unique, 1, 0, 0, pid, 0, 0)
        self._end.send(head + body)

    def send(self, raw: bytes) -> None:
        self._end.send(raw)

    def answer(self) -> tuple[int, int]:
        """(which request, errno) of the next answer."""
        _, number, unique = _REPLY.unpack_from(self._end.recv(1 << 16))
        return unique, -number

    def has_more(self) -> bool:
        self._end.setblocking(False)
        try:
            return bool(self._end.recv(1))
        except BlockingIOError:
            return False
        finally:
            self._end.settimeout(20)


class Handler:
    def __init__(self, handle: Handle) -> None:
        self.handle = handle


@contextmanager
def serving(handle: Handle, *, time_limit_s: float = 20.0) -> Iterator[Kernel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = FuseChannel(theirs.fileno(), Handler(handle), time_limit_s=time_limit_s)
    thread = threading.Thread(target=channel.run, kwargs={"is_takeover": False})
    thread.start()
    with theirs:
        try:
            yield Kernel(ours)
        finally:
            ours.close()
            thread.join(20)
            assert not thread.is_alive()


def slowly(
    may_end: threading.Event,
    has_ended: threading.Event,
    under_way: threading.Semaphore | None = None,
) -> Handle:
    """Answers a READ when it may, anything else at once; releases for each READ under way."""

    def handle(request: wire.Request, deadline_s: float) -> "Answer | Later":
        if request.operation != wire.READ:
            return wire.answer(request.unique)

        if under_way is not None:
            under_way.release()

        def later(deadline_s: float) -> Answer:
            may_end.wait(20)
            has_ended.set()
            return wire.answer(request.unique, b"too late")

        return later

    return handle


def test_a_request_is_answered_once_at_its_deadline_and_what_comes_later_is_dropped() -> None:
    may_end, has_ended = threading.Event(), threading.Event()
    with serving(slowly(may_end, has_ended), time_limit_s=0.3) as kernel:
        kernel.ask(wire.READ, 2)
        kernel.ask(wire.STATFS, 4)
        assert kernel.answer() == (4, 0)  # nobody waits for the slow one
        assert kernel.answer() == (2, errno.EIO)
        may_end.set()
        assert has_ended.wait(20)
        kernel.ask(wire.STATFS, 6)
        assert kernel.answer() == (6, 0)
        assert not kernel.has_more()


def test_an_interrupt_ends_the_wait_of_a_reader_that_is_gone_and_of_nobody_else() -> None:
    may_end, has_ended, under_way = threading.Event(), threading.Event(), threading.Semaphore(0)
    with serving(slowly(may_end, has_ended, under_way)) as kernel:
        kernel.ask(wire.READ, 2, pid=os.getpid())
        kernel.ask(wire.READ, 4, pid=0)
        assert under_way.acquire(timeout=20)
        assert under_way.acquire(timeout=20)  # several threads read: an interrupt may overtake
        kernel.ask(wire.INTERRUPT, 3, struct.pack("<Q", 2))
        kernel.ask(wire.INTERRUPT, 5, struct.pack("<Q", 4))
        assert kernel.answer() == (4, errno.EINTR)
        may_end.set()
        assert kernel.answer() == (2, 0)


def test_an_interrupt_of_what_is_not_under_way_is_to_be_asked_again() -> None:
    with serving(lambda request, deadline_s: None) as kernel:
        kernel.ask(wire.INTERRUPT, 3, struct.pack("<Q", 2))
        assert kernel.answer() == (3, errno.EAGAIN)


def test_whatever_a_handler_raises_the_request_is_answered() -> None:
    faults = {
        2: OSError(errno.ESTALE, "gone"),
        4: wire.WireError("cut"),
        6: ZeroDivisionError("a bug"),
    }

    def handle(request: wire.Request, deadline_s: float) -> Answer:
        raise faults[request.unique]

    with serving(handle) as kernel:
        for unique, number in ((2, errno.ESTALE), (4, errno.EINVAL), (6, errno.EIO)):
            kernel.ask(wire.STATFS, unique)
            assert kernel.answer() == (unique, number)


def test_what_is_no_request_harms_nobody() -> None:
    with serving(lambda request, deadline_s: wire.answer(request.unique)) as kernel:
        kernel.send(b"short")
        kernel.send(b"\xff" * 100)
        kernel.ask(wire.FORGET, 1)
        kernel.ask(wire.STATFS, 2)
        assert kernel.answer() == (2, 0)
        assert not kernel.has_more()
