"""Bringing files into the page cache ahead of whoever needs them.

Paced: at most two steps are in flight. Asking for everything at once would fill the disk's queue,
and the small reads that a start waits for (folders, metadata, mounts) would stand behind it.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_STEP_BYTES = 8 << 20
# Of one call the kernel reads no more than the device's own read-ahead or largest request, and
# says nothing of the rest. Hardly any device has less than this.
_CALL_BYTES = 128 << 10

_log = logging.getLogger(__name__)


def prefetch(files: Sequence[Path]) -> int:
    """Has the kernel read the files, in order; returns the bytes now in its cache. Blocking.

    A step that is cached already costs some microseconds. Files that cannot be read are passed
    over: their reader will say so.
    """
    done = 0
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            done += _read_through(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    return done


def _read_through(descriptor: int, size_bytes: int) -> int:
    """Asks for each step, then waits for the last byte of the one before."""
    for begin in range(0, size_bytes, _STEP_BYTES):
        for part in range(begin, min(begin + _STEP_BYTES, size_bytes), _CALL_BYTES):
            os.posix_fadvise(descriptor, part, _CALL_BYTES, os.POSIX_FADV_WILLNEED)
        if begin:
            os.pread(descriptor, 1, begin - 1)
    if size_bytes:
        os.pread(descriptor, 1, size_bytes - 1)
    return size_bytes


class ReadAhead:
    """Prefetches in the background, one list of files after the other."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def begin(self, files: Sequence[Path]) -> None:
        """Returns at once."""
        self._worker.submit(prefetch, files).add_done_callback(_note)

    def close(self) -> None:
        """Gives up what has not begun."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def _note(reading: Future[int]) -> None:
    if not reading.cancelled() and (error := reading.exception()):
        _log.warning("reading ahead failed, the start goes on without: %s", error)
