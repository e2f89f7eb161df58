"""Serving one `/dev/fuse` descriptor: threads, slow answers, deadlines, killed readers.

    kernel → reading threads → handler ─ answer at once ───────────────→ kernel
                                  └─ `Later` → workers (may wait for a network) → kernel

A reading thread never waits for a network, so a stalled origin holds up only who wants its bytes.
Every request is answered exactly once: by the handler, or with EIO at its deadline, or with EINTR
when its asker is being killed. A result that comes after that is dropped.
"""

import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nagara.base.errors import NagaraError
from nagara.image import fuse_wire as wire

_log = logging.getLogger(__name__)
_READERS = 4
_WORKERS = 1024  # a bound on what waits for the network, whoever still wants it
_WATCH_S = 0.1
_FATAL = 1 << 8  # SIGKILL's bit; the kernel pends it for whatever ends a process
_LOCAL = threading.local()
# Memory of answers that no thread is using: its pages are there already.
_SPARE: deque[memoryview] = deque(maxlen=16)

Answer = bytes | memoryview
Later = Callable[[float], Answer]  # deadline (monotonic seconds) → the answer


class Handler(Protocol):
    """What the file system consists of. Called from many threads."""

    def handle(self, request: wire.Request, deadline_s: float) -> "Answer | Later | None":
        """The answer, or a call that makes it and may block; None: nothing is to be answered.

        OSError, `WireError` and `NagaraError` become error answers.
        """
        ...


@dataclass(slots=True)
class _Pending:
    request: wire.Request
    deadline_s: float
    is_interrupted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_answered: bool = False

    def take(self) -> bool:
        """The right to answer; given once."""
        with self.lock:
            is_first = not self.is_answered
            self.is_answered = True
            return is_first


class FuseChannel:
    """The loop over one descriptor.

    Args:
        descriptor: of `/dev/fuse`, mounted; stays the caller's.
        time_limit_s: after which a request is answered with EIO.
    """

    def __init__(self, descriptor: int, handler: Handler, *, time_limit_s: float = 60.0) -> None:
        self._descriptor = descriptor
        self._handler = handler
        self._time_limit_s = time_limit_s
        self._pending: dict[int, _Pending] = {}
        self._workers = ThreadPoolExecutor(_WORKERS, "fetch")
        self._ended = threading.Event()

    def run(self, *, is_takeover: bool) -> None:
        """Serves until the mount is gone.

        Args:
            is_takeover: another daemon served before; what it left unanswered is asked again.

        Raises:
            OSError: EINVAL when the kernel (before 6.9) cannot send requests again.
        """
        if is_takeover:
            os.write(self._descriptor, wire.resend())
        threads = [
            threading.Thread(target=self._read_all, name=f"fuse-{number}", daemon=True)
            for number in range(_READERS)
        ]
        for thread in threads:
            thread.start()
        watch = threading.Thread(target=self._watch, name="fuse-watch", daemon=True)
        watch.start()
        for thread in threads:
            thread.join()
        self._ended.set()
        watch.join()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def store(self, node: int, offset: int, data: memoryview) -> None:
        """Gives the kernel bytes of a file that it has looked up, from a page on, for its cache.

        Raises OSError.
        """
        os.writev(self._descriptor, [wire.stored(node, offset, len(data)), data])

    def _read_all(self) -> None:
        room = memoryview(bytearray(wire.REQUEST_BYTES))
        while True:
            try:
                size = os.readv(self._descriptor, [room])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # a request was taken back before we had it
                if error.errno != errno.ENODEV:  # ENODEV: unmounted
                    _log.exception("the kernel's requests cannot be read")
                return
            if size == 0:  # no device, and its other end was closed
                return
            try:
                self._take(wire.parse_request(bytes(room[:size])))
            except wire.WireError as error:
                _log.warning("a malformed request: %s", error)

    def _take(self, request: wire.Request) -> None:
        if request.operation in wire.SILENT:
            return
        if request.operation == wire.INTERRUPT:
            self._interrupt(request)
            return
        if request.operation == wire.INIT:
            self._reply(wire.init_answer(request))
            return
        pending = _Pending(request, time.monotonic() + self._time_limit_s)
        self._pending[request.unique] = pending
        result = self._guarded(pending, self._handler.handle)
        if callable(result):
            self._workers.submit(self._work, pending, result)
        else:
            self._finish(pending, result)

    def _work(self, pending: _Pending, later: Later) -> None:
        if pending.is_answered:
            return
        answer = self._guarded(pending, lambda _, deadline_s: later(deadline_s))
        assert not callable(answer)
        self._finish(pending, answer)
        _give_back_buffer()

    def _guarded(
        self,
        pending: _Pending,
        call: "Callable[[wire.Request, float], Answer | Later | None]",
    ) -> "Answer | Later | None":
        unique = pending.request.unique
        try:
            return call(pending.request, pending.deadline_s)
        except OSError as error:
            return wire.failure(unique, error.errno or errno.EIO)
        except wire.WireError:
            return wire.failure(unique, errno.EINVAL)
        except NagaraError as error:
            _log.warning("%s", str(error).splitlines()[0])
            return wire.failure(unique, errno.EIO)
        except Exception:  # noqa: BLE001 - the root of every request: it must be answered
            _log.exception("a request failed")
            return wire.failure(unique, errno.EIO)

    def _finish(self, pending: _Pending, answer: Answer | None) -> None:
        if pending.take() and answer is not None:
            self._reply(answer)
        self._pending.pop(pending.request.unique, None)

    def _reply(self, answer: Answer) -> None:
        try:
            os.write(self._descriptor, answer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return  # the asker or the mount is gone
            # The kernel did not like the answer and goes on waiting: it must get another one.
            _log.error("an answer was refused: %s", error)
            if len(answer) > wire.OUT_BYTES:
                self._reply(wire.failure(wire.unique_of(answer), errno.EIO))

    def _interrupt(self, request: wire.Request) -> None:
        pending = self._pending.get(wire.interrupted_in(request))
        if pending is None:
            # Not read yet by another thread, or answered meanwhile: then the kernel forgets it.
            self._reply(wire.failure(request.unique, errno.EAGAIN))
            return
        pending.is_interrupted = True
        self._check(pending, time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            now = time.monotonic()
            for pending in list(self._pending.values()):
                self._check(pending, now)

    def _check(self, pending: _Pending, now: float) -> None:
        """Other signals than fatal ones do not end a wait: a disk does not return EINTR either."""
        unique = pending.request.unique
        if now > pending.deadline_s:
            self._finish(pending, wire.failure(unique, errno.EIO))
        elif pending.is_interrupted and _is_being_killed(pending.request.pid):
            self._finish(pending, wire.failure(unique, errno.EINTR))


def answer_buffer(unique: int, size: int) -> tuple[memoryview, memoryview]:
    """(whole answer, its body) in memory of this thread, valid until it is asked for again.

    The body begins with a page: the kernel copies it page by page into its cache.
    """
    buffer = getattr(_LOCAL, "buffer", None)
    if buffer is None:
        try:
            buffer = _SPARE.pop()
        except IndexError:
            pages = memoryview(mmap.mmap(-1, mmap.PAGESIZE + wire.MAX_READ_BYTES))
            buffer = pages[mmap.PAGESIZE - wire.OUT_BYTES :]
        _LOCAL.buffer = buffer
    buffer[: wire.OUT_BYTES] = wire.header(unique, size)
    whole = buffer[: wire.OUT_BYTES + size]
    return whole, whole[wire.OUT_BYTES :]


def _give_back_buffer() -> None:
    """There are many workers and few of them answer at a time: none keeps a megabyte."""
    buffer = getattr(_LOCAL, "buffer", None)
    if buffer is not None:
        _LOCAL.buffer = None
        _SPARE.append(buffer)


def _is_being_killed(thread: int) -> bool:
    """Also true when the thread is gone or cannot be seen."""
    if thread == 0:
        return True
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return True
    pending = [line.split()[1] for line in status.splitlines() if line.startswith("SigPnd")]
    return any(int(mask, 16) & _FATAL for mask in pending)
