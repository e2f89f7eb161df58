"""One doer per thing at a time: inside a process by waiting, between processes by file locks.

No lock here covers more than one object or chunk, so a slow one keeps nobody else waiting. The
kernel drops a file lock with its holder, however that ends.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nagara.store.errors import UnavailableError

_POLL_S = (0.001, 0.05)  # first and longest pause while another process works
_PATIENCE_S = 5.0  # so long one that may be stuck is waited for
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class _Flight(NamedTuple):
    ended: Future[None]
    deadline_s: float  # of who works


class Flights:
    """Calls under way, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[Hashable, _Flight] = {}

    def run(self, key: Hashable, work: Callable[[], object], deadline_s: float) -> bool:
        """Calls `work`, or waits until the one who is calling it has ended; True if it was us.

        Who waited gets the same error as who worked, unless that was only out of time: who has
        more of it then works itself.

        Raises `UnavailableError` when the deadline passes while waiting.
        """
        while True:
            with self._lock:
                flight = self._flying.get(key)
                if flight is None:
                    mine = self._flying[key] = _Flight(Future[None](), deadline_s)
                    break
            try:
                flight.ended.result(max(0.0, deadline_s - time.monotonic()))
            except WaitedTooLong:
                raise UnavailableError("not fetched in time", where=str(key)) from None
            except UnavailableError:
                if not flight.deadline_s <= time.monotonic() < deadline_s:
                    raise
                continue
            return False
        try:
            work()
        except BaseException as error:
            self._land(key)
            mine.ended.set_exception(error)
            raise
        self._land(key)
        mine.ended.set_result(None)
        return True

    def _land(self, key: Hashable) -> None:
        with self._lock:
            del self._flying[key]


@contextmanager
def claimed(path: Path, deadline_s: float) -> Iterator[int]:
    """A descriptor of the file at `path`, held by this process alone.

    The file is created if need be. When another process renamed or removed it while we waited,
    the new one at that name is claimed. Raises `UnavailableError` at the deadline.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _poll(lambda fd=descriptor: _try_flock(fd), deadline_s, path)  # type: ignore[misc]
            if not _is_at(path, descriptor):
                continue
            yield descriptor
            return
        finally:
            os.close(descriptor)


@contextmanager
def range_claimed(descriptor: int, start: int, length: int, deadline_s: float) -> Iterator[None]:
    """Holds a part of an open file against other processes that write the same bytes there.

    One that gets nowhere is not waited for (`patience_s`): then the part is held by both.

    The lock belongs to the open file, not to the process: closing another descriptor of the same
    file does not drop it (it would with plain POSIX locks).
    """
    try:
        until_s = patience_s(deadline_s)
        _poll(lambda: _try_range(descriptor, fcntl.F_WRLCK, start, length), until_s, None)
    except UnavailableError:
        yield
        return
    try:
        yield
    finally:
        _try_range(descriptor, fcntl.F_UNLCK, start, length)


def patience_s(deadline_s: float) -> float:
    """Until when to wait for another process that fetches what we want: its line may be the one
    that hangs. Then there is as much time left to do it ourselves."""
    now_s = time.monotonic()
    return now_s + min(_PATIENCE_S, max(0.0, deadline_s - now_s) / 2)


def _poll(attempt: Callable[[], bool], deadline_s: float, where: Path | None) -> None:
    pause_s = _POLL_S[0]
    while not attempt():
        if time.monotonic() + pause_s > deadline_s:
            raise UnavailableError(
                "another process did not finish it in time", where=str(where) if where else None
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_range(descriptor: int, kind: int, start: int, length: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)
