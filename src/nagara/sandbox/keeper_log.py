"""A replica's output on disk, bounded: the current file and one older. Standard library only."""

import contextlib
import os
from pathlib import Path

_LIMIT_BYTES = 8 << 20


class ChildLog:
    """Appends to `path`; at 8 MiB the file becomes `path.1` and a new one begins.

    Whatever the disk does (full, read-only, folder removed) loses log lines, never the replica:
    the keeper goes on reading its pipe. Only opening the first file may raise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # may just have been tidied away
        self._descriptor = self._open()
        self._size_bytes = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with contextlib.suppress(OSError):
            if self._size_bytes + len(data) > _LIMIT_BYTES:
                self._rotate()
            self._size_bytes += os.write(self._descriptor, data)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        opened = self._open()  # before the old one is closed: there is always one to write to
        os.close(self._descriptor)
        self._descriptor, self._size_bytes = opened, 0
