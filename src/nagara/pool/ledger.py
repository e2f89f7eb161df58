"""The pool's durable record: machines, leases, orders of a person, the latest plan.

One SQLite file, written by the process that owns the pool, in one transaction per step. Other
processes (`nagara pool status`) read it while it is in use. Its calls block for about a
millisecond and run on a thread of their own, never on the loop.
"""

import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from nagara.contract.machine import Offering, Resources
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import PoolError
from nagara.pool.machines import LeaseRow, MachineRow, Saved, Writes
from nagara.pool.states import MachineEvent, MachineState

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE machines (
    name TEXT PRIMARY KEY, offering TEXT NOT NULL, state TEXT NOT NULL, epoch INTEGER NOT NULL,
    reason TEXT NOT NULL, address TEXT NOT NULL, after_drain TEXT);
CREATE TABLE leases (
    slot TEXT PRIMARY KEY, machine TEXT NOT NULL, epoch INTEGER NOT NULL, app TEXT,
    needs TEXT NOT NULL, wanted TEXT NOT NULL);
CREATE INDEX leases_by_machine ON leases (machine);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, machine TEXT NOT NULL, what TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Order:
    """What a person wants done with a machine: "drain" or "resume"."""

    id: int
    machine: str
    what: str


class Ledger(Protocol):
    """Where the pool writes before it acts."""

    def read(self) -> Saved:
        """Everything."""
        ...

    def write(self, writes: Writes) -> None:
        """Makes all of it durable, or raises and leaves all of it."""
        ...


class MemoryLedger:
    """A ledger that lives as long as the process: for simulations and tests."""

    def __init__(self, pool: str = "n0") -> None:
        self._pool = pool
        self._machines: dict[str, MachineRow] = {}
        self._leases: dict[str, LeaseRow] = {}

    def read(self) -> Saved:
        """Everything."""
        return Saved(self._pool, tuple(self._machines.values()), tuple(self._leases.values()))

    def write(self, writes: Writes) -> None:
        """Keeps it."""
        for row in writes.machines:
            self._machines[row.name] = row
        for lease in writes.leases:
            self._leases[lease.slot] = lease
        for name in writes.gone:
            self._machines.pop(name, None)
            for slot in [slot for slot in self._leases if slot.startswith(f"{name}/")]:
                del self._leases[slot]


class SqliteLedger:
    """The record in a file.

    Args:
        path: made with mode 0600 if missing, unless `readonly`.

    Raises:
        PoolError: no such file (`readonly`), or a newer nagara wrote it.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        if readonly and not path.exists():
            raise PoolError("there is no pool here", where=str(path), hint="`nagara up` keeps one")
        if not readonly:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        mode = "ro" if readonly else "rw"
        # Opened by the loop's thread, used by one other.
        self._db = sqlite3.connect(
            f"{path.as_uri()}?mode={mode}", uri=True, check_same_thread=False
        )
        self._db.row_factory = sqlite3.Row
        if not readonly:
            self._db.execute("PRAGMA journal_mode = WAL")
            # Machines cost money: their records survive a power cut too.
            self._db.execute("PRAGMA synchronous = FULL")
        self._migrate(str(path), readonly=readonly)

    def close(self) -> None:
        """Gives the file free."""
        self._db.close()

    def read(self) -> Saved:
        """Everything."""
        machines = tuple(
            MachineRow(
                name=row["name"],
                offering=offering_from(json.loads(row["offering"])),
                state=MachineState(row["state"]),
                epoch=row["epoch"],
                reason=row["reason"],
                address=row["address"],
                after_drain=MachineEvent(row["after_drain"]) if row["after_drain"] else None,
            )
            for row in self._db.execute("SELECT * FROM machines ORDER BY rowid")
        )
        leases = tuple(
            LeaseRow(
                slot=row["slot"],
                epoch=row["epoch"],
                app=row["app"],
                needs=Resources(**json.loads(row["needs"])),
                wanted=_wanted_from(json.loads(row["wanted"])),
            )
            for row in self._db.execute("SELECT * FROM leases ORDER BY rowid")
        )
        return Saved(str(self.fact("pool")), machines, leases)

    def write(self, writes: Writes) -> None:
        """One transaction."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO machines VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        row.name, json.dumps(asdict(row.offering)), row.state, row.epoch,
                        row.reason, row.address, row.after_drain,
                    )
                    for row in writes.machines
                ],
            )  # fmt: skip
            db.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (
                        row.slot, row.slot.rpartition("/")[0], row.epoch, row.app,
                        json.dumps(asdict(row.needs)), json.dumps(_wanted_document(row.wanted)),
                    )
                    for row in writes.leases
                ],
            )  # fmt: skip
            gone = [(name,) for name in writes.gone]
            db.executemany("DELETE FROM machines WHERE name = ?", gone)
            db.executemany("DELETE FROM leases WHERE machine = ?", gone)

    def fact(self, key: str) -> Any:
        """A JSON value kept under a name, or None."""
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return json.loads(row["value"]) if row else None

    def put_fact(self, key: str, value: object) -> None:
        """Keeps a JSON value for other processes to read: the latest plan, figures."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))

    def add_order(self, machine: str, what: str) -> None:
        """Leaves an order for the process that owns the pool."""
        with self._transaction() as db:
            db.execute("INSERT INTO orders (machine, what) VALUES (?, ?)", (machine, what))

    def orders(self) -> tuple[Order, ...]:
        """Orders nobody has carried out yet, oldest first."""
        rows = self._db.execute("SELECT id, machine, what FROM orders ORDER BY id")
        return tuple(Order(row["id"], row["machine"], row["what"]) for row in rows)

    def drop_order(self, id_: int) -> None:
        """The order was carried out, or cannot be."""
        with self._transaction() as db:
            db.execute("DELETE FROM orders WHERE id = ?", (id_,))

    def _migrate(self, where: str, *, readonly: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and readonly:
            raise PoolError("there is no pool here yet", where=where)
        if version > _SCHEMA_VERSION:
            raise PoolError(
                f"the pool's record is of version {version}, this nagara knows {_SCHEMA_VERSION}",
                where=where,
                hint="use the newer nagara that wrote it",
            )
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = 1; COMMIT;")
            # Told apart from machines of other pools that the same account pays for.
            self.put_fact("pool", f"nagara-{secrets.token_hex(4)}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._db:
            yield self._db


def offering_from(document: dict[str, Any]) -> Offering:
    """The inverse of `dataclasses.asdict` for an offering."""
    resources = document.get("resources")
    return Offering(
        **{**document, "resources": None if resources is None else Resources(**resources)}
    )


def _wanted_document(wanted: DemandClass) -> dict[str, Any]:
    types = None if wanted.types is None else sorted(wanted.types)
    return {"types": types, "regions": list(wanted.regions), "devices": wanted.devices}


def _wanted_from(document: dict[str, Any]) -> DemandClass:
    types = document["types"]
    return DemandClass(
        None if types is None else frozenset(types),
        tuple(document["regions"]),
        document["devices"],
    )
