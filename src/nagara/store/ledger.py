"""What a machine's object folders hold, in SQLite: sizes, last use, proofs of verification, pins.

It is why nothing is scanned at start: the total is one row. It may forget the last moments
before a power cut and then knows too little, never too much that matters: a row is written
before its file appears (a row without a file is evicted like any other), and an object without
a proof is read again before it is trusted.

One database for all tenants of a folder, so that one bound holds for the disk. Every method may
be called from any thread and from several processes at once; each is a transaction of its own
and takes well below a millisecond, evictions excepted.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from nagara.store.errors import FullError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    space INTEGER NOT NULL,           -- bytes on the disk, holes not counted
    used_s REAL NOT NULL,
    inode INTEGER NOT NULL DEFAULT 0, -- 0: not proven
    size INTEGER NOT NULL DEFAULT 0,
    ctime_ns INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS objects_by_use ON objects (used_s);
CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), space INTEGER NOT NULL);
INSERT OR IGNORE INTO total VALUES (1, 0);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON objects
    BEGIN UPDATE total SET space = space + new.space; END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON objects
    BEGIN UPDATE total SET space = space - old.space; END;
CREATE TABLE IF NOT EXISTS pins (
    holder TEXT NOT NULL,             -- who needs it: a mount's folder
    tenant TEXT NOT NULL,
    list TEXT NOT NULL,               -- the reference list that names what is needed
    PRIMARY KEY (holder, tenant, list)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS complete (
    tenant TEXT NOT NULL,
    list TEXT NOT NULL,               -- everything it names is here and was proven
    boot TEXT NOT NULL,               -- during this boot of the machine
    PRIMARY KEY (tenant, list)
) WITHOUT ROWID;
"""
_BUSY_S = 30.0
_BATCH = 256
# Room beside the database that is given up for what makes room, when the disk is full.
_RESERVE_BYTES = 512 << 10


class Proof(NamedTuple):
    """A file as it was when its content had been checked and was on the disk."""

    inode: int
    size: int
    ctime_ns: int


class Pin(NamedTuple):
    """`holder` needs everything that the reference list `list` of `tenant` names."""

    holder: str
    tenant: str
    list: str


T = TypeVar("T")
Forbidden = Callable[[list[Pin]], Callable[[str, str], bool]]


def read_pins(path: Path) -> list[Pin]:
    """The pins in a ledger that nobody here has open; none when there is no ledger."""
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
        return [Pin(*row) for row in connection.execute("SELECT holder, tenant, list FROM pins")]


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait here as it does elsewhere when others open the new database too."""
    give_up_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > give_up_s:
                raise
        time.sleep(0.01)


class Ledger:
    """The database in one file."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._where = str(path)
        self._reserve = path.with_name(path.name + ".reserve")
        self._connection = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        with self._held():
            _use_write_ahead_log(self._connection)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)
        self._uses: dict[tuple[str, str], float] = {}
        self._has_reserve = False
        self._lay_reserve()

    def close(self) -> None:
        with contextlib.suppress(FullError), self._transaction():
            self._write_uses()
        with self._lock:
            self._connection.close()

    def total_bytes(self) -> int:
        """Space taken by all objects of all tenants."""
        return int(self._one("SELECT space FROM total"))

    def count(self, tenant: str) -> tuple[int, int]:
        """How many objects a tenant has, and their space."""
        with self._held():
            row = self._connection.execute(
                "SELECT count(*), coalesce(sum(space), 0) FROM objects WHERE tenant = ?", (tenant,)
            ).fetchone()
        return int(row[0]), int(row[1])

    def add(self, tenant: str, name: str, space: int) -> None:
        """Records an object that is about to appear. One that is known is used again."""
        with self._held():
            self._connection.execute(
                "INSERT INTO objects (tenant, name, space, used_s) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET used_s = excluded.used_s",
                (tenant, name, space, time.time()),
            )

    def add_many(self, tenant: str, entries: Iterable[tuple[str, int]]) -> None:
        """`add` for (name, space) pairs, as one transaction."""
        now = time.time()
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO objects (tenant, name, space, used_s) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET used_s = excluded.used_s",
                ((tenant, name, space, now) for name, space in entries),
            )

    def prove(self, tenant: str, proofs: Iterable[tuple[str, Proof]]) -> None:
        """Records (name, proof): checked and on the disk. What was evicted since stays unknown."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE objects SET inode = ?, size = ?, ctime_ns = ? "
                "WHERE tenant = ? AND name = ?",
                ((*proof, tenant, name) for name, proof in proofs),
            )

    def proof(self, tenant: str, name: str) -> Proof | None:
        """What was recorded when the object was last checked."""
        with self._held():
            row = self._connection.execute(
                "SELECT inode, size, ctime_ns FROM objects WHERE tenant = ? AND name = ?",
                (tenant, name),
            ).fetchone()
        return Proof(*row) if row and row[0] else None

    def proofs(self, tenant: str, limit: int) -> dict[str, Proof]:
        """`proof` of the tenant's objects, of at most so many."""
        with self._held():
            rows = self._connection.execute(
                "SELECT name, inode, size, ctime_ns FROM objects WHERE tenant = ? LIMIT ?",
                (tenant, limit),
            ).fetchall()
        return {name: Proof(*proof) for name, *proof in rows if proof[0]}

    def drop(self, tenant: str, name: str) -> None:
        """Forgets an object that is gone, and that any list of its tenant was complete."""

        def forget() -> None:
            with self._transaction():
                self._connection.execute(
                    "DELETE FROM objects WHERE tenant = ? AND name = ?", (tenant, name)
                )
                self._connection.execute("DELETE FROM complete WHERE tenant = ?", (tenant,))

        self._freeing(forget)

    def use(self, tenant: str, name: str) -> None:
        """Notes that the object was used now; written later, with others."""
        with self._lock:
            self._uses[tenant, name] = time.time()
        if len(self._uses) >= _BATCH:
            with contextlib.suppress(FullError), self._transaction():
                self._write_uses()

    def pin(self, pin: Pin) -> None:
        """From now on no eviction takes what the list names."""
        with self._held():
            self._connection.execute("INSERT OR IGNORE INTO pins VALUES (?, ?, ?)", pin)

    def unpin(self, holder: str) -> None:
        """Takes back all pins of a holder."""

        def forget() -> None:
            with self._held():
                self._connection.execute("DELETE FROM pins WHERE holder = ?", (holder,))

        self._freeing(forget)

    def pins(self) -> list[Pin]:
        with self._held():
            rows = self._connection.execute("SELECT holder, tenant, list FROM pins").fetchall()
        return [Pin(*row) for row in rows]

    def set_complete(self, tenant: str, list_name: str, boot: str) -> None:
        """Everything the list names is here and proven. Only for lists that are pinned."""
        with self._held():
            self._connection.execute(
                "INSERT OR REPLACE INTO complete VALUES (?, ?, ?)", (tenant, list_name, boot)
            )

    def is_complete(self, tenant: str, list_name: str, boot: str) -> bool:
        with self._held():
            row = self._connection.execute(
                "SELECT 1 FROM complete WHERE tenant = ? AND list = ? AND boot = ?",
                (tenant, list_name, boot),
            ).fetchone()
        return row is not None

    def evict(self, wanted: int, forbidden: Forbidden, remove: Callable[[str, str], None]) -> int:
        """Removes the longest unused objects until `wanted` bytes are free; returns how many.

        `forbidden` gets the pins and returns a test of (tenant, name). Pins, choice and removal
        are one transaction: who pins waits, and then finds only what is really there.
        """
        return self._freeing(lambda: self._evict(wanted, forbidden, remove))

    def _evict(self, wanted: int, forbidden: Forbidden, remove: Callable[[str, str], None]) -> int:
        freed = 0
        with self._transaction():
            self._write_uses()
            pins = self._connection.execute("SELECT holder, tenant, list FROM pins").fetchall()
            is_forbidden = forbidden([Pin(*row) for row in pins])
            victims = []
            for tenant, name, space in self._connection.execute(
                "SELECT tenant, name, space FROM objects ORDER BY used_s"
            ):
                if freed >= wanted:
                    break
                if not is_forbidden(tenant, name):
                    victims.append((tenant, name))
                    freed += space
            for victim in victims:
                remove(*victim)
            self._connection.executemany(
                "DELETE FROM objects WHERE tenant = ? AND name = ?", victims
            )
            if victims:  # only what is pinned is certain to be still complete
                self._connection.execute(
                    "DELETE FROM complete WHERE (tenant, list) NOT IN "
                    "(SELECT tenant, list FROM pins)"
                )
        return freed

    def names(self, tenant: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        """(name, space, last use) of a tenant's objects behind `after`, in the order of names."""
        last = after
        while True:
            with self._held():
                rows = self._connection.execute(
                    "SELECT name, space, used_s FROM objects WHERE tenant = ? AND name > ? "
                    "ORDER BY name LIMIT 1000",
                    (tenant, last),
                ).fetchall()
            if not rows:
                return
            yield from rows
            last = rows[-1][0]

    def _freeing(self, work: Callable[[], T]) -> T:
        """Does what makes room; on a full disk with the room kept for it."""
        try:
            result = work()
        except FullError:
            self._has_reserve = False
            self._reserve.unlink(missing_ok=True)
            result = work()
        if not self._has_reserve:
            self._lay_reserve()
        return result

    def _lay_reserve(self) -> None:
        with contextlib.suppress(OSError):  # full: it is laid when there is room again
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
            finally:
                os.close(descriptor)
            self._has_reserve = True

    def _one(self, query: str) -> int:
        with self._held():
            return int(self._connection.execute(query).fetchone()[0])

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The lock; a full disk gets its own error."""
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise FullError("the disk is full", where=self._where) from error
                raise

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._held():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _write_uses(self) -> None:
        """Inside the lock."""
        uses = [(used_s, *key) for key, used_s in self._uses.items()]
        self._uses.clear()
        self._connection.executemany(
            "UPDATE objects SET used_s = ? WHERE tenant = ? AND name = ?", uses
        )
