"""The pool's record as tables of control's state.

A killed process loses nothing of it. A power cut may lose the last commits: then a machine that
was launched is found in its provider's list under this pool's name and released.
"""

import json
import secrets
from dataclasses import asdict
from typing import Any

from nagara.contract.machine import CheckKind, Resources
from nagara.control.sql import Database, Sql
from nagara.pool.lease import machine_of
from nagara.pool.ledger import offering_from, wanted_document, wanted_from
from nagara.pool.machines import LeaseRow, MachineRow, Saved, Writes
from nagara.pool.states import MachineEvent, MachineState

_PUT_MACHINE = """INSERT INTO pool_machines
    (name, offering, state, epoch, reason, address, after_drain, diagnosis, kept_out)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET offering = excluded.offering, state = excluded.state,
    epoch = excluded.epoch, reason = excluded.reason, address = excluded.address,
    after_drain = excluded.after_drain, diagnosis = excluded.diagnosis,
    kept_out = excluded.kept_out"""
_PUT_LEASE = """INSERT INTO pool_leases
    (slot, machine, epoch, app, needs, wanted) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (slot) DO UPDATE SET epoch = excluded.epoch, app = excluded.app,
    needs = excluded.needs, wanted = excluded.wanted"""
_PUT_FACT = """INSERT INTO pool_facts (key, value) VALUES (?, ?)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""


class PoolRecord:
    """The `Record` of one pool."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Saved:
        """Everything. A new pool gets a name, by which its machines are told from others'."""
        name = await self.fact("pool")
        if name is None:
            name = f"nagara-{secrets.token_hex(4)}"
            await self.put_fact("pool", name)
        machines, leases = await self._database.run(_read)
        return Saved(str(name), machines, leases)

    async def write(self, writes: Writes) -> None:
        """One transaction."""
        machines = [
            (
                row.name, json.dumps(asdict(row.offering)), row.state, row.epoch,
                row.reason, row.address, row.after_drain,
                row.diagnosis, json.dumps(row.kept_out),
            )
            for row in writes.machines
        ]  # fmt: skip
        leases = [
            (
                row.slot, machine_of(row.slot), row.epoch, row.app,
                json.dumps(asdict(row.needs)), json.dumps(wanted_document(row.wanted)),
            )
            for row in writes.leases
        ]  # fmt: skip
        gone = [(name,) for name in writes.gone]

        def act(db: Sql) -> None:
            db.executemany(_PUT_MACHINE, machines)
            db.executemany(_PUT_LEASE, leases)
            if gone:
                db.executemany("DELETE FROM pool_machines WHERE name = ?", gone)
                db.executemany("DELETE FROM pool_leases WHERE machine = ?", gone)

        await self._database.run(act)

    async def fact(self, key: str) -> Any:
        """A JSON value kept under a name, or None."""

        def act(db: Sql) -> Any:
            row = db.execute("SELECT value FROM pool_facts WHERE key = ?", (key,)).fetchone()
            return json.loads(row["value"]) if row else None

        return await self._database.run(act)

    async def put_fact(self, key: str, value: object) -> None:
        """Keeps a JSON value."""
        text = json.dumps(value)
        await self._database.run(lambda db: db.execute(_PUT_FACT, (key, text)))


def _read(db: Sql) -> tuple[tuple[MachineRow, ...], tuple[LeaseRow, ...]]:
    machines = tuple(
        MachineRow(
            name=row["name"],
            offering=offering_from(json.loads(row["offering"])),
            state=MachineState(row["state"]),
            epoch=row["epoch"],
            reason=row["reason"],
            address=row["address"],
            after_drain=MachineEvent(row["after_drain"]) if row["after_drain"] else None,
            diagnosis=CheckKind(row["diagnosis"]),
            kept_out=tuple(json.loads(row["kept_out"])),
        )
        for row in db.execute("SELECT * FROM pool_machines ORDER BY rowid")
    )
    leases = tuple(
        LeaseRow(
            slot=row["slot"],
            epoch=row["epoch"],
            app=row["app"],
            needs=Resources(**json.loads(row["needs"])),
            wanted=wanted_from(json.loads(row["wanted"])),
        )
        for row in db.execute("SELECT * FROM pool_leases ORDER BY rowid")
    )
    return machines, leases
