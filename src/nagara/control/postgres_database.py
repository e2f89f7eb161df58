"""The state in a PostgreSQL database that several control processes may share.

One of them is the writer: it holds a lease in the database, renewed by a thread and a connection
of its own. Every transaction first proves the lease, and holds it against a take-over until it
has ended: a process that was stopped or cut off for a while can write nothing that its successor
does not know of. The others wait in `open` and try again and again.

    lease   LEASE_S long, renewed every RENEW_S; times are the database's, so clocks may differ
    lost    not renewed in time, or another's name in it: `on_lost` is called once
    held    for LEASE_S from the beginning of the last renewal on, by this machine's own clock,
            which counts suspension: afterwards nothing may be ordered from machines either

A lease is released at a graceful end, so that the next process need not wait for its end.
"""

import asyncio
import functools
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from nagara.contract.control_epoch import ControlEpoch
from nagara.control.epoch import begin_epoch
from nagara.control.errors import ControlError, StateLostError
from nagara.control.migrations import MIGRATIONS
from nagara.control.sql import Rows, Sql
from nagara.control.state_lock import take_lock

T = TypeVar("T")

LEASE_S = 3.0
RENEW_S = 1.0
TRY_S = 0.5
CONNECT_S = 5

_SCHEMA_LOCK = 0x6E616761  # any number of ours: two processes do not migrate at once
_TABLES = (
    "CREATE TABLE IF NOT EXISTS nagara_schema (version INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS nagara_writer (
        id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL, epoch BIGINT NOT NULL,
        ends TIMESTAMPTZ NOT NULL)""",
    """INSERT INTO nagara_writer VALUES (1, '', 0, '-infinity') ON CONFLICT (id) DO NOTHING""",
)
_TAKE = """UPDATE nagara_writer
    SET holder = %s, epoch = epoch + 1, ends = clock_timestamp() + make_interval(secs => %s)
    WHERE id = 1 AND ends < clock_timestamp() RETURNING epoch"""
_RENEW = """UPDATE nagara_writer SET ends = clock_timestamp() + make_interval(secs => %s)
    WHERE id = 1 AND holder = %s AND epoch = %s AND ends >= clock_timestamp() RETURNING epoch"""
_PROVE = """SELECT 1 FROM nagara_writer
    WHERE id = 1 AND holder = %s AND epoch = %s AND ends >= clock_timestamp() FOR SHARE"""
_RELEASE = """UPDATE nagara_writer SET ends = '-infinity'
    WHERE id = 1 AND holder = %s AND epoch = %s"""

_log = logging.getLogger(__name__)


class PostgresDatabase:
    """A `Database` with one writer at a time.

    Args:
        folder: the state folder, for tokens; made with mode 0700 if missing.
        url: a PostgreSQL address; its password is never said.

    Attributes:
        epoch: of this process as the writer, once it is.
        on_lost: called on the loop, once, when this process may write no longer.

    Raises:
        StateBusyError: another process uses the folder.
        ControlError: psycopg is not installed.
    """

    epoch: ControlEpoch

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._psycopg = _psycopg()
        self._url = url
        self._where = _without_password(url)
        self._lock = take_lock(folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nagara-state")
        self._connection: Any = None
        self._holder = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._epoch = 0  # of the lease
        self._renewed_s = -math.inf
        self._is_over = threading.Event()
        self._renewing: threading.Thread | None = None
        self.on_lost: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Waits for the lease, then brings the schema up to date.

        Raises:
            ControlError: the database cannot be reached, or is of a newer version.
        """
        await self._call(self._prepare)
        if not await self._call(self._take):
            _log.info("%s: another control process has the state; waiting for it", self._where)
            await self._until_taken()
        await self._call(self._migrate)
        loop = asyncio.get_running_loop()
        self._renewing = threading.Thread(
            target=self._renew_for_ever, args=(loop,), name="nagara-lease", daemon=True
        )
        self._renewing.start()
        self.epoch = await self.run(lambda sql: begin_epoch(sql, time.time()))

    async def _until_taken(self) -> None:
        """Also beyond a time without a database: whoever waits is there for such times."""
        is_told = False
        while True:
            await asyncio.sleep(TRY_S)
            try:
                if await self._call(self._take):
                    return
                is_told = False
            except ControlError as error:
                if not is_told:
                    _log.warning("waiting on: %s", error)
                is_told = True

    def is_held(self) -> bool:
        """See `Database`."""
        return _clock_s() - self._renewed_s < LEASE_S

    async def run(self, action: Callable[[Sql], T]) -> T:
        """See `Database`."""

        def transact() -> T:
            connection = self._connected()
            with connection.transaction():
                if connection.execute(_PROVE, (self._holder, self._epoch)).fetchone() is None:
                    raise StateLostError(
                        "another control process has taken the state over", where=self._where
                    )
                return action(_Adapter(connection))

        return await self._call(transact)

    async def close(self) -> None:
        """Gives the lease back."""
        self._is_over.set()
        renewing = self._renewing
        if renewing is not None:
            await asyncio.get_running_loop().run_in_executor(None, renewing.join)
        await self._call(self._release)
        self._thread.shutdown(wait=True)
        os.close(self._lock)

    # -- on the writer thread --------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return function()
            except self._psycopg.Error as error:
                raise ControlError(
                    f"the state cannot be used: {str(error).strip()}", where=self._where,
                    hint="is the database running, and may this user use it?",
                ) from error  # fmt: skip

        return await asyncio.get_running_loop().run_in_executor(self._thread, translated)

    def _connected(self) -> Any:
        """The connection, made anew if it broke."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Any:
        return self._psycopg.connect(
            self._url, autocommit=True, row_factory=_row_factory, connect_timeout=CONNECT_S,
            application_name="nagara", keepalives_idle=5, keepalives_interval=2,
            keepalives_count=2, tcp_user_timeout=int(1000 * LEASE_S),
        )  # fmt: skip

    def _prepare(self) -> None:
        connection = self._connected()
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            for statement in _TABLES:
                connection.execute(statement)

    def _take(self) -> bool:
        connection = self._connected()
        begun_s = _clock_s()
        row = connection.execute(_TAKE, (self._holder, LEASE_S)).fetchone()
        if row is None:
            return False
        self._epoch, self._renewed_s = row[0], begun_s
        return True

    def _migrate(self) -> None:
        connection = self._connected()
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            row = connection.execute("SELECT version FROM nagara_schema").fetchone()
            version = row[0] if row else 0
            if version > len(MIGRATIONS):
                raise ControlError(
                    f"the state is of version {version}, this nagara knows {len(MIGRATIONS)}",
                    where=self._where, hint="use the newer nagara that wrote it",
                )  # fmt: skip
            for step in MIGRATIONS[version:]:
                for statement in step:
                    connection.execute(schema_statement(statement))
            connection.execute("DELETE FROM nagara_schema")
            connection.execute("INSERT INTO nagara_schema VALUES (%s)", (len(MIGRATIONS),))

    def _release(self) -> None:
        if self._connection is None or self._connection.closed:
            return
        try:
            if self._epoch:
                self._connection.execute(_RELEASE, (self._holder, self._epoch))
        except self._psycopg.Error as error:
            _log.warning("%s: the lease ends by itself, not given back: %s", self._where, error)
        finally:
            self._connection.close()

    # -- on the lease's thread -------------------------------------------------------------

    def _renew_for_ever(self, loop: asyncio.AbstractEventLoop) -> None:
        connection: Any = None
        while not self._is_over.wait(RENEW_S):
            begun_s = _clock_s()
            try:
                if connection is None or connection.closed:
                    connection = self._connect()
                row = connection.execute(_RENEW, (LEASE_S, self._holder, self._epoch)).fetchone()
                if row is None:
                    break
                self._renewed_s = begun_s
            except self._psycopg.Error as error:
                _log.warning("%s: the lease was not renewed: %s", self._where, error)
                connection = None
                if not self.is_held():
                    break
        if connection is not None:
            connection.close()
        if not self._is_over.is_set():
            loop.call_soon_threadsafe(self.on_lost)


class _Adapter:
    """A connection that takes the statements of `sql`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        cursor: Rows = self._connection.execute(statement_for(sql), parameters)
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> object:
        with self._connection.cursor() as cursor:
            return cursor.executemany(statement_for(sql), parameters)


class _Row:
    """A row by number and by name, without the column that only keeps the order."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: dict[str, int], values: Sequence[Any]) -> None:
        self._names, self._values = names, values

    def __getitem__(self, key: int | str) -> Any:
        return self._values[key if isinstance(key, int) else self._names[key]]

    def keys(self) -> list[str]:
        return [name for name in self._names if name != "seq"]


def _row_factory(cursor: Any) -> Callable[[Sequence[Any]], _Row]:
    names = {column.name: number for number, column in enumerate(cursor.description or ())}
    return lambda values: _Row(names, values)


@functools.lru_cache
def statement_for(sql: str) -> str:
    """A statement of `sql` in PostgreSQL's words."""
    return re.sub(r"\browid\b", "seq", sql.replace("%", "%%").replace("?", "%s"))


def schema_statement(sql: str) -> str:
    """A step of the schema in PostgreSQL's words: its types, and the order of rows as `seq`."""
    sql = re.sub(r"\bBLOB\b", "BYTEA", sql)
    sql = re.sub(r"\bREAL\b", "DOUBLE PRECISION", re.sub(r"\bINTEGER\b", "BIGINT", sql))
    if sql.startswith("CREATE TABLE"):
        return f"{sql.rstrip().removesuffix(')')}, seq BIGSERIAL)"
    return sql


def _clock_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = parts.username
    return urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host, query=""))


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise ControlError(
            f"PostgreSQL needs the package psycopg ({error})",
            hint="install nagara[postgres]",
        ) from error
    return psycopg
