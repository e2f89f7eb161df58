"""Which object a file became at an earlier import, so that it need not be read again.

    TENANT/imports.sqlite   (device, inode, size, times) → object

A file counts as unchanged while all of that is the same; one that changed shortly before it was
read is not remembered, because a clock's step could hide a second change. Only a hint to save
reading: whether the object is still here is asked separately. Called from any thread.
"""

import contextlib
import os
import sqlite3
import threading
import time
from pathlib import Path

from nagara.store.errors import BadNameError
from nagara.store.names import ObjectName, parse_name

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    device INTEGER NOT NULL, inode INTEGER NOT NULL, size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (device, inode)
) WITHOUT ROWID
"""
_QUIET_S = 2.0
_BUSY_S = 30.0
_State = tuple[int, int, int]


class FileMemory:
    """The memory of one tenant's imports; use as a context manager, kept at its end.

    A database that cannot be read is as if it were empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[_State, str]] = {}
        self._new: dict[tuple[int, int], tuple[_State, str]] = {}

    def __enter__(self) -> "FileMemory":
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._open()) as database:
            for device, inode, size, mtime, ctime, name in database.execute("SELECT * FROM files"):
                self._known[device, inode] = (size, mtime, ctime), name
        return self

    def __exit__(self, *_: object) -> None:
        rows = [(*key, *state, name) for key, (state, name) in self._new.items()]
        if not rows:
            return
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._open()) as database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
            database.execute("COMMIT")

    def find(self, state: os.stat_result) -> ObjectName | None:
        """What the file was when it last looked exactly like this."""
        found = self._known.get((state.st_dev, state.st_ino))
        if found is None or found[0] != _state(state):
            return None
        try:
            return parse_name(found[1])
        except BadNameError:
            return None

    def note(self, state: os.stat_result, name: ObjectName) -> None:
        """The file that looked like this before and after it was read is that object."""
        last_change_s = max(state.st_mtime_ns, state.st_ctime_ns) / 1e9
        if time.time() - last_change_s > _QUIET_S:
            with self._lock:
                self._new[state.st_dev, state.st_ino] = _state(state), str(name)

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        database.execute(_SCHEMA)
        return database


def _state(state: os.stat_result) -> _State:
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns
