"""The pool's record in control's state."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nagara.contract.machine import CheckKind, Resources
from nagara.control.pool_record import PoolRecord
from nagara.control.sqlite_database import SqliteDatabase
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.ledger import MemoryLedger
from nagara.pool.machines import MachineRow, Writes
from nagara.pool.states import MachineEvent, MachineState
from nagara.testing.pools import a_core, an_offering, make_ready


@pytest.fixture
async def record(tmp_path: Path) -> AsyncIterator[PoolRecord]:
    database = SqliteDatabase(tmp_path)
    await database.open()
    yield PoolRecord(database)
    await database.close()


async def test_what_was_written_is_read_again(record: PoolRecord) -> None:
    memory = MemoryLedger()
    core = a_core()
    make_ready(core, an_offering(resources=Resources(4, 5, 6)))
    wanted = DemandClass(frozenset({"h100"}), ("eu-*",), 2)
    core.claim(Claimant("app"), wanted, 0.0, Resources(cpu=1.0))
    going = make_ready(core, an_offering("b"))
    core.drain(going, MachineEvent.RELEASE, "too many", 0.0)
    core.keep_out(make_ready(core, an_offering("c")), "Xid 9999")
    core.diagnose(make_ready(core, an_offering("d")), CheckKind.HEAVY, "weekly", 0.0)
    writes = core.take_writes()
    assert {row.kept_out for row in writes.machines} == {(), ("Xid 9999",)}
    await record.write(writes)
    memory.write(writes)
    seen = await record.read()
    assert seen.machines == memory.read().machines
    assert seen.leases == memory.read().leases


async def test_a_pool_has_a_name_of_its_own_that_stays(record: PoolRecord, tmp_path: Path) -> None:
    assert (await record.read()).pool == (await record.read()).pool
    other = SqliteDatabase(tmp_path / "other")
    await other.open()
    assert (await PoolRecord(other).read()).pool != (await record.read()).pool
    await other.close()


async def test_machines_that_are_gone_leave_nothing_behind(record: PoolRecord) -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    core.claim(Claimant("app"), DemandClass(), 0.0)
    await record.write(core.take_writes())
    await record.write(Writes(gone=(name,)))
    seen = await record.read()
    assert seen.machines == ()
    assert seen.leases == ()


async def test_a_transaction_that_fails_leaves_everything_as_it_was(record: PoolRecord) -> None:
    good = MachineRow("m", an_offering(), MachineState.READY, 1, "", "", None)
    bad = MachineRow("n", an_offering(), MachineState.READY, 2**70, "", "", None)
    with pytest.raises(OverflowError):
        await record.write(Writes((good, bad)))
    assert (await record.read()).machines == ()


async def test_facts_are_kept_by_name(record: PoolRecord) -> None:
    assert await record.fact("statistics") is None
    await record.put_fact("statistics", {"a": [1]})
    await record.put_fact("statistics", {"a": [2]})
    assert await record.fact("statistics") == {"a": [2]}
