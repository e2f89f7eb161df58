import sqlite3
from pathlib import Path

import pytest

from nagara.contract.machine import Resources
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import PoolError
from nagara.pool.fairness import Claimant
from nagara.pool.ledger import MemoryLedger, SqliteLedger
from nagara.pool.machines import MachineRow, Writes
from nagara.pool.states import MachineEvent, MachineState
from nagara.testing.pools import a_core, an_offering, make_ready


def test_what_was_written_is_read_again_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "pool.db"
    ledger, memory = SqliteLedger(path), MemoryLedger()
    core = a_core()
    make_ready(core, an_offering(resources=Resources(4, 5, 6)))
    core.claim(Claimant("app"), DemandClass(), 0.0, Resources(cpu=1.0))
    going = make_ready(core, an_offering("b"))
    core.drain(going, MachineEvent.RELEASE, "too many", 0.0)
    writes = core.take_writes()
    ledger.write(writes)
    memory.write(writes)
    seen = SqliteLedger(path, readonly=True).read()
    assert seen.machines == memory.read().machines
    assert seen.leases == memory.read().leases


def test_a_pool_has_a_name_of_its_own_that_stays(tmp_path: Path) -> None:
    names = {SqliteLedger(tmp_path / file).read().pool for file in ("a", "a", "b")}
    assert len(names) == 2


def test_machines_that_are_gone_leave_nothing_behind(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "pool.db")
    core = a_core()
    name = make_ready(core, an_offering())
    core.claim(Claimant("app"), DemandClass(), 0.0)
    ledger.write(core.take_writes())
    ledger.write(Writes(gone=(name,)))
    assert ledger.read().machines == ()
    assert ledger.read().leases == ()


def test_a_transaction_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "pool.db")
    good = MachineRow("m", an_offering(), MachineState.READY, 1, "", "", None)
    bad = MachineRow("n", an_offering(), MachineState.READY, 2**70, "", "", None)
    with pytest.raises(OverflowError):
        ledger.write(Writes((good, bad)))
    assert ledger.read().machines == ()


def test_orders_and_facts_pass_between_processes(tmp_path: Path) -> None:
    ledger, other = SqliteLedger(tmp_path / "pool.db"), SqliteLedger(tmp_path / "pool.db")
    other.add_order("m", "drain")
    (order,) = ledger.orders()
    assert (order.machine, order.what) == ("m", "drain")
    ledger.drop_order(order.id)
    ledger.put_fact("plan", {"launch": []})
    assert other.orders() == ()
    assert other.fact("plan") == {"launch": []}


def test_reading_where_there_is_no_pool_says_so(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="no pool"):
        SqliteLedger(tmp_path / "pool.db", readonly=True)


def test_a_record_of_a_newer_nagara_is_left_alone(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "pool.db").execute("PRAGMA user_version = 99")
    with pytest.raises(PoolError, match="version 99"):
        SqliteLedger(tmp_path / "pool.db")
