"""Which files a replica opens while it starts, as the kernel reports them. Needs root.

A saved process holds more of the machine than what it has mapped: a Python server has read its
sources once and closed them. They decide what it is as much as mapped libraries do, and so are
remembered with the snapshot. See fanotify(7).

The kernel reports for whole file systems: all of the replica's own root, and of the machine's
those that hold folders bound into it. There also other processes' openings below these folders
are noted; that makes a snapshot stale too often, never too late. One thread of its own reads.
"""

import contextlib
import ctypes
import errno
import os
import select
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

_CLOEXEC, _NONBLOCK, _UNLIMITED_QUEUE = 1, 2, 0x10
_MARK_ADD, _MARK_FILESYSTEM = 1, 0x100
_OPENED = 0x20
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_READ_BYTES = 8192  # every event read is an open descriptor: some hundred at most
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_libc = ctypes.CDLL(None, use_errno=True)


class OpenedFiles:
    """Notes what is opened from now on until `close`.

    Args:
        root: where the replica's root is mounted.
        binds: folders of the machine that the replica sees under the same paths.

    Raises:
        OSError: this kernel, or the rights of this process, do not allow it.
    """

    def __init__(self, root: Path, binds: Sequence[Path]) -> None:
        self._root = str(root)
        self._binds = tuple(f"{bind}/" for bind in binds)
        self._opened: set[str] = set()
        self._is_complete = True
        self._thread: threading.Thread | None = None
        with contextlib.ExitStack() as undo:
            self._own = _group((root,))
            undo.callback(os.close, self._own)
            self._shared = _group(binds)
            undo.callback(os.close, self._shared)
            self._stop, self._stopping = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, self._stop)
            undo.callback(os.close, self._stopping)
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._read_on, name="opened files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the noting. Idempotent. Blocks for some milliseconds at most."""
        if self._thread is not None:
            os.write(self._stopping, b"x")
            self._thread.join()
            self._thread = None
            self._undo.close()

    def paths(self) -> frozenset[str]:
        """What was opened, as the replica names it. After `close`.

        Raises:
            OSError: not all of it is known.
        """
        if not self._is_complete:
            raise OSError(errno.EOVERFLOW, "the kernel could not report every opened file")
        return frozenset(self._opened)

    def _read_on(self) -> None:
        poll = select.poll()
        for descriptor in (self._own, self._shared, self._stop):
            poll.register(descriptor, select.POLLIN)
        is_ending = False
        while not is_ending:
            is_ending = any(descriptor == self._stop for descriptor, _ in poll.poll())
            for group in (self._own, self._shared):
                while self._read(group):
                    pass

    def _read(self, group: int) -> bool:
        """Takes some reports; False when there are no more."""
        try:
            data = os.read(group, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:  # of a file deleted since, or for want of descriptors
            self._is_complete &= error.errno not in _SHORTAGES
            return self._is_complete
        for begin in range(0, len(data), _EVENT.size):
            *_, descriptor, _ = _EVENT.unpack_from(data, begin)
            if descriptor < 0:  # the queue has overflowed
                self._is_complete = False
                continue
            with contextlib.suppress(OSError):
                self._note(group, str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            os.close(descriptor)
        return True

    def _note(self, group: int, path: str) -> None:
        if group == self._own:
            # The runtime's own, before it has changed its root, begin with the mount's place.
            self._opened.add(path.removeprefix(self._root))
        elif path.startswith(self._binds):
            self._opened.add(path)


def _group(places: Sequence[Path]) -> int:
    """A descriptor of reports about the file systems of `places`."""
    flags = _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE
    # Without O_NONBLOCK the kernel would wait for a writer of each reported fifo.
    group = _libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    _check(group, "fanotify")
    try:
        for place in places:
            mask, how = ctypes.c_uint64(_OPENED), _MARK_ADD | _MARK_FILESYSTEM
            _check(_libc.fanotify_mark(group, how, mask, _AT_FDCWD, os.fsencode(place)), str(place))
    except OSError:
        os.close(group)
        raise
    return int(group)


def _check(result: int, where: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), where)
