"""The state in one SQLite file, and one thread that touches it.

The thin layer between `state` and SQLite: whoever wants something hands a function over a
connection to the one writer thread and awaits its result. The loop never waits for a disk, and
transactions never interleave. Moving the log into the database needs fsync, which on a busy disk
takes seconds: that is done on a second thread, so that no start waits for it.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from nagara.contract.control_epoch import ControlEpoch
from nagara.control.epoch import begin_epoch
from nagara.control.errors import ControlError
from nagara.control.migrations import MIGRATIONS
from nagara.control.sql import Sql
from nagara.control.state_lock import take_lock

T = TypeVar("T")

_log = logging.getLogger(__name__)

CHECKPOINT_COMMITS = 500


class SqliteDatabase:
    """The state folder's database, owned by this process while it is open.

    Args:
        folder: made with mode 0700 if missing; its files are 0600.

    Attributes:
        epoch: of this process as its owner, once it is open.

    Raises:
        StateBusyError: another process has it open.
    """

    epoch: ControlEpoch

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / "control.db"
        self._lock = take_lock(folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nagara-state")
        self._checkpoints = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nagara-disk")
        self._connection: sqlite3.Connection | None = None
        self.commits = 0
        self.on_lost: Callable[[], None] = lambda: None  # never: the folder's lock ends with us

    async def open(self) -> None:
        """Connects and brings the schema up to date."""
        self._connection = await self._call(self._connect)
        self.epoch = await self.run(lambda sql: begin_epoch(sql, time.time()))

    def is_held(self) -> bool:
        """Until the end of this process."""
        return True

    async def run(self, action: Callable[[Sql], T]) -> T:
        """Runs `action` as one transaction on the writer thread; its exception rolls back.

        Raises:
            ControlError: the database cannot be read or written, most likely for want of space.
        """
        connection = self._connection
        assert connection is not None, "the database is not open"

        def transact() -> T:
            with connection:
                return action(connection)

        try:
            result = await self._call(transact)
        except sqlite3.OperationalError as error:
            raise ControlError(
                f"the state cannot be used: {error}",
                where=str(self._path),
                hint="is there space left on its disk?",
            ) from error
        self.commits += 1
        if self.commits % CHECKPOINT_COMMITS == 0:
            self._checkpoints.submit(self._checkpoint)
        return result

    async def close(self) -> None:
        """Waits for what was handed over, then gives the folder free."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._checkpoints.shutdown)
        if self._connection is not None:
            await self._call(self._connection.close)
            self._connection = None
        self._thread.shutdown(wait=True)
        os.close(self._lock)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _connect(self) -> sqlite3.Connection:
        path = self._path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        # Only ever used on the writer thread, but closed and opened by calls from the loop.
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        # The last commits may be lost in a power cut, and with the power go all replicas they
        # speak of; a killed process loses nothing. In exchange a commit needs no fsync.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection, str(path))
        return connection

    def _checkpoint(self) -> None:
        """Runs on a thread of its own; it neither blocks the writer nor waits for it."""
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error:
            _log.exception("the database's log was not moved; it will be tried again")


def _migrate(connection: sqlite3.Connection, where: str) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ControlError(
            f"the state is of version {version}, this nagara knows {len(MIGRATIONS)}",
            where=where,
            hint="use the newer nagara that wrote it",
        )
    for number in range(version, len(MIGRATIONS)):
        with connection:
            connection.execute("BEGIN")
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
