"""The state, the same over SQLite and over a real PostgreSQL server."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from postgres_server import needs_postgres

from nagara.base.errors import UsageError
from nagara.contract.replica import CaptureReport, Lease
from nagara.control import retention
from nagara.control.app import App
from nagara.control.appfile import parse_apps
from nagara.control.database import database_for
from nagara.control.errors import ControlError, StateBusyError, StateLostError
from nagara.control.history import History
from nagara.control.migrations import MIGRATIONS
from nagara.control.pool_record import PoolRecord
from nagara.control.postgres_database import schema_statement, statement_for
from nagara.control.retention import VERSIONS, forget
from nagara.control.sql import Database, Sql
from nagara.control.state import CaptureRecord, KeyRecord, StartRecord, State
from nagara.pool.machines import Writes
from nagara.testing.clock import JumpingClock
from nagara.testing.pools import a_core, an_offering, make_ready


@pytest.fixture
async def database(tmp_path: Path, address: str | None) -> AsyncIterator[Database]:
    database = database_for(tmp_path, address)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
def state(database: Database) -> State:
    return State(database, JumpingClock())


def app(name: str = "a", more: str = "") -> App:
    return parse_apps(f'[app.{name}]\nimage = "host"\ncommand = ["x"]\n{more}', "f")[0]


def lease(slot: str = "s-1", epoch: int = 2**40) -> Lease:
    return Lease(slot, epoch, 60.0)


async def test_apps_have_versions_and_the_last_is_the_present_one(state: State) -> None:
    assert await state.put_app(app("b")) == 1
    assert await state.put_app(app("a")) == 1
    assert await state.put_app(app("b", "port = 9")) == 2
    found = await state.apps()
    assert {(one.app.name, one.version, one.app.port) for one in found} == {
        ("b", 2, 9), ("a", 1, 8000),
    }  # fmt: skip
    await state.delete_app("default", "b")
    assert [one.app.name for one in await state.apps()] == ["a"]


async def test_replicas_are_recorded_newest_first(state: State) -> None:
    for number in range(3):
        await state.add_replica(f"a-{number}", app(), lease(), state="starting", purpose="serve")
    await state.set_replica("a-1", "failed", "bad luck")
    await state.set_replica("a-1", "failed")
    rows = await state.replicas("default", "a")
    assert [row["replica"] for row in rows] == ["a-2", "a-1", "a-0"]
    assert (rows[1]["state"], rows[1]["reason"], rows[1]["epoch"]) == ("failed", "bad luck", 2**40)
    assert await state.app_of("a-2") == ("default", "a")
    assert await state.app_of("b-2") is None
    await state.end_lost_replicas(frozenset({"a-2"}))
    assert [row["state"] for row in await state.replicas("default", "a")] == [
        "starting", "failed", "failed",
    ]  # fmt: skip


async def test_starts_captures_and_keys_come_back_as_they_were(state: State) -> None:
    start = StartRecord(
        "a-1", "default", "a", "plain", {"host": 0.123456789012345, "unaccounted": 0.0}, 1.5,
        1_700_000_000.123456, fallback="100 % sure?", snapshot="s", files={"reads": [1, 2]},
    )  # fmt: skip
    await state.add_start(start)
    await state.add_start(start)  # the same again replaces it
    failed = StartRecord("a-2", "default", "a", None, {}, 1.0, start.started_s, error="é\n")
    await state.add_start(failed)
    assert await state.starts("default", "a") == [failed, start]
    assert await state.starts("default", "a", replica="a-1") == [start]

    capture = CaptureRecord("c-1", 3, CaptureReport("snap", None, 2**40, 7, 1.25))
    await state.add_capture(app(), capture)
    assert await state.captures("default", "a", app().definition) == [capture]

    keys = [KeyRecord(f"k{n}", "default", "n", f"sha{n}", 1.5) for n in range(3)]
    for key in keys:
        await state.add_key(key)
    assert await state.delete_key("k1")
    assert not await state.delete_key("k1")
    assert await state.keys() == [keys[0], keys[2]]


async def test_what_people_watch_is_told_a_page_at_a_time(database: Database, state: State) -> None:
    history = History(database)
    assert await history.starts() == []
    assert await history.starts_after(0) == []
    for number in range(6):
        name = "ab"[number % 2]
        await state.add_start(
            StartRecord(f"{name}-{number}", "default", name, "plain", {"host": 1.0}, 1.5, 10.0,
                        host={"tool": 0.5} if number else None)
        )  # fmt: skip
    whole = await history.starts()
    assert [one["replica"] for one in whole] == ["b-5", "a-4", "b-3", "a-2", "b-1", "a-0"]
    assert (whole[0]["stages"], whole[0]["host"]) == ({"host": 1.0}, {"tool": 0.5})
    json.dumps(whole)
    first = await history.starts(app="a", limit=2)
    rest = await history.starts(app="a", before=first[-1]["id"])
    assert [one["replica"] for one in first + rest] == ["a-4", "a-2", "a-0"]
    assert await history.starts_after(whole[2]["id"]) == [whole[1], whole[0]]

    await state.put_app(app("a"))
    await state.add_replica("a-9", app("a"), lease(), state="starting", purpose="serve")
    assert [one["replica"] for one in await history.replicas("a")] == ["a-9"]
    for other in (app("a"), app("a", "port = 9")):
        report = CaptureReport(f"of {other.port}", None, 2, 1, 0.5)
        await state.add_capture(other, CaptureRecord(f"c-{other.port}", 1, report))
    found = {one["snapshot"]: one["is_present"] for one in await history.captures("a")}
    assert found == {"of 8000": True, "of 9": False}
    assert len(await history.captures()) == 2
    assert await history.captures("b") == []


async def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    def act(db: Sql) -> None:
        db.execute("INSERT INTO apps (tenant, app, version) VALUES ('t', 'a', 1)")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await database.run(act)
    count = await database.run(lambda db: db.execute("SELECT count(*) FROM apps").fetchone()[0])
    assert count == 0


async def test_a_wrong_statement_is_an_error_with_the_place_and_no_harm(
    database: Database, state: State
) -> None:
    with pytest.raises(ControlError, match="the state cannot be used"):
        await database.run(lambda db: db.execute("SELECT * FROM nothing"))
    assert await state.apps() == []


async def test_the_pools_record_is_the_same_there(database: Database) -> None:
    core = a_core()
    make_ready(core, an_offering())
    record = PoolRecord(database)
    await record.write(core.take_writes())
    saved = await record.read()
    assert [machine.offering for machine in saved.machines] == [an_offering()]
    assert (await PoolRecord(database).read()).pool == saved.pool
    await record.write(Writes((), (), tuple(machine.name for machine in saved.machines)))
    assert (await record.read()).machines == ()


# -- retention -----------------------------------------------------------------------------


async def test_old_history_goes_and_what_is_in_use_stays(database: Database) -> None:
    clock = JumpingClock()
    state = State(database, clock)
    for name in ("a", "b"):
        for number in range(VERSIONS + 5):
            await state.put_app(app(name, f"port = {number + 1}"))
    await state.set_version(app("a", "port = 2"), 2)
    for number in range(12):
        await clock.leap(1.0)
        await state.add_replica(f"a-{number}", app(), lease(), state="ready", purpose="serve")
        if number != 1:
            await state.set_replica(f"a-{number}", "stopped")
        at_s = clock.wall_s()
        await state.add_start(StartRecord(f"a-{number}", "default", "a", "plain", {}, 1.0, at_s))
    await database.run(forget)
    versions = [one.number for one in await state.versions("default", "a")]
    assert versions == [*range(VERSIONS + 5, 5, -1), 2]  # the present one is older than all kept
    assert len(await state.versions("default", "b")) == VERSIONS
    assert len(await state.starts("default", "a")) == 12  # fewer than are kept


async def test_the_newest_rows_of_each_app_are_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple((table, at, over, 3) for table, at, over, _ in retention._TABLES)
    monkeypatch.setattr(retention, "_TABLES", few)
    clock = JumpingClock()
    state = State(database, clock)
    for number in range(8):
        await clock.leap(1.0)
        for name in ("a", "b"):
            await state.add_replica(
                f"{name}-{number}", app(name), lease(), state="ready", purpose="serve"
            )
            if number != 1:
                await state.set_replica(f"{name}-{number}", "stopped")
            record = StartRecord(
                f"{name}-{number}", "default", name, "plain", {}, 1.0, clock.wall_s()
            )
            await state.add_start(record)
    await database.run(forget)
    for name in ("a", "b"):
        starts = [one.replica for one in await state.starts("default", name)]
        assert starts == [f"{name}-7", f"{name}-6", f"{name}-5"]
        replicas = [row["replica"] for row in await state.replicas("default", name)]
        assert replicas == [f"{name}-7", f"{name}-6", f"{name}-5", f"{name}-1"]  # it lives


# -- upgrades ------------------------------------------------------------------------------

# As the first version wrote it.
OLD_APP = {
    "canary": {"body": None, "is_openai": False, "path": "/health"}, "command": ["serve"],
    "device": "any", "env": [["A", "1"]], "image": "host",
    "limits": {"cpu": None, "memory_bytes": None}, "models": ["m"], "name": "old", "port": 8000,
    "ready": "/health",
    "scale": {"concurrency": 8, "idle_s": None, "max": 4, "min": 0}, "served_model": None,
    "snapshot": True, "tenant": "default",
    "timeouts": {"queue_s": None, "request_s": 600.0, "start_s": 600.0},
}  # fmt: skip
FILLED = [
    ("INSERT INTO versions (tenant, app, version, definition, document, deployed_s)"
     " VALUES ('default', 'old', 3, 'd', ?, 1.5)", (json.dumps(OLD_APP),)),
    ("INSERT INTO apps (tenant, app, version) VALUES ('default', 'old', 3)", ()),
    ("INSERT INTO replicas (replica, tenant, app, definition, purpose, slot, epoch, state, reason,"
     " created_s, changed_s) VALUES ('old-1', 'default', 'old', 'd', 'serve', 's', 1, 'ready',"
     " NULL, 1.5, 1.5)", ()),
    ("INSERT INTO starts (replica, tenant, app, kind, stages, total_s, fallback, snapshot, error,"
     " started_s) VALUES ('old-1', 'default', 'old', 'plain', '{\"host\": 1.0}', 1.0, NULL, NULL,"
     " NULL, 1.5)", ()),
    ("INSERT INTO captures (replica, tenant, app, definition, version, snapshot, reason,"
     " memory_bytes, layer_bytes, elapsed_s, finished_s) VALUES ('old-c', 'default', 'old', 'd',"
     " 3, 'snap', NULL, 5, 6, 7.0, 1.5)", ()),
    ("INSERT INTO keys (id, tenant, name, sha256, created_s)"
     " VALUES ('k', 'default', 'first', 'sha', 1.5)", ()),
]  # fmt: skip


def make_old(folder: Path, address: str | None, version: int) -> None:
    """A state as nagara left it when it knew so many steps."""
    if address is None:
        connection = sqlite3.connect(folder / "control.db")
        for step in MIGRATIONS[:version]:
            for statement in step:
                connection.execute(statement)
        for statement, values in FILLED if version else ():
            connection.execute(statement, values)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.commit()
        connection.close()
        return
    with psycopg.connect(address) as server:
        server.execute("CREATE TABLE nagara_schema (version INTEGER NOT NULL)")
        server.execute("INSERT INTO nagara_schema VALUES (%s)", (version,))
        for step in MIGRATIONS[:version]:
            for statement in step:
                server.execute(schema_statement(statement))
        for statement, values in FILLED if version else ():
            server.execute(statement_for(statement), values)


@pytest.mark.parametrize("version", range(len(MIGRATIONS) + 1))
async def test_a_state_of_every_earlier_version_is_brought_up_to_date(
    tmp_path: Path, address: str | None, version: int
) -> None:
    make_old(tmp_path, address, version)
    for _ in range(2):
        database = database_for(tmp_path, address)
        await database.open()
        state = State(database, JumpingClock())
        apps = await state.apps()
        if version:
            assert [(one.app.name, one.version, one.app.env) for one in apps] == [
                ("old", 3, (("A", "1"),))
            ]
            (start,) = await state.starts("default", "old")
            assert (start.kind, start.stages, start.files) == ("plain", {"host": 1.0}, None)
            assert (await state.captures("default", "old", "d"))[0].report.snapshot == "snap"
            assert [key.sha256 for key in await state.keys()] == ["sha"]
            assert await state.put_app(app("old")) in (4, 5)
            assert await state.put_app(apps[0].app) in (5, 6)
            await database.run(lambda db: db.execute("DELETE FROM versions WHERE version > 3"))
            await database.run(lambda db: db.execute("UPDATE apps SET version = 3"))
        await PoolRecord(database).read()
        await database.close()


async def test_a_newer_state_is_refused(tmp_path: Path, address: str | None) -> None:
    database = database_for(tmp_path, address)
    await database.open()
    await database.close()
    if address is None:
        connection = sqlite3.connect(tmp_path / "control.db")
        connection.execute("PRAGMA user_version = 1000")
        connection.close()
    else:
        with psycopg.connect(address) as server:
            server.execute("UPDATE nagara_schema SET version = 1000")
    database = database_for(tmp_path, address)
    with pytest.raises(ControlError, match="version 1000"):
        await database.open()
    await database.close()


# -- one writer ----------------------------------------------------------------------------


async def test_an_unknown_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SQLite or PostgreSQL"):
        database_for(tmp_path, "mysql://x")


async def test_two_processes_never_share_a_folder(tmp_path: Path, address: str | None) -> None:
    database = database_for(tmp_path, address)
    with pytest.raises(StateBusyError):
        database_for(tmp_path, address)
    await database.close()


@needs_postgres
async def test_a_second_process_waits_and_follows_when_the_first_has_ended(
    tmp_path: Path, url: str
) -> None:
    first, second = database_for(tmp_path / "1", url), database_for(tmp_path / "2", url)
    await first.open()
    waiting = asyncio.create_task(second.open())
    await State(first, JumpingClock()).put_app(app())
    assert not waiting.done()
    await first.close()
    await asyncio.wait_for(waiting, 30)
    assert [one.app.name for one in await State(second, JumpingClock()).apps()] == ["a"]
    await second.close()


HOLDER = """
import asyncio, sys
from pathlib import Path
from nagara.control.database import database_for
async def main():
    database = database_for(Path(sys.argv[1]), sys.argv[2])
    await database.open()
    print("open", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@needs_postgres
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_second_process_follows_one_that_was_killed_or_hangs(
    tmp_path: Path, url: str, how: signal.Signals
) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220 - it is killed, not waited for
        [sys.executable, "-c", HOLDER, str(tmp_path / "1"), url], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    os.kill(process.pid, how)
    second = database_for(tmp_path / "2", url)
    await asyncio.wait_for(second.open(), 60)
    assert await State(second, JumpingClock()).put_app(app()) == 1
    process.kill()
    process.wait()
    process.stdout.close()
    await second.close()


def steal(url: str) -> None:
    with psycopg.connect(url) as server:
        server.execute("UPDATE nagara_writer SET ends = '-infinity'")


@needs_postgres
async def test_who_has_lost_the_lease_writes_nothing_and_is_told(tmp_path: Path, url: str) -> None:
    first, second = database_for(tmp_path / "1", url), database_for(tmp_path / "2", url)
    is_lost = asyncio.Event()
    first.on_lost = is_lost.set
    await first.open()
    steal(url)
    await second.open()
    with pytest.raises(StateLostError):
        await State(first, JumpingClock()).put_app(app())
    await asyncio.wait_for(is_lost.wait(), 30)
    assert await State(second, JumpingClock()).apps() == []
    await first.close()
    assert await State(second, JumpingClock()).put_app(app()) == 1  # its lease was not given back
    await second.close()


def break_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = 'test' AND pid <> pg_backend_pid()"
        )


@needs_postgres
async def test_who_waits_for_the_state_waits_on_when_the_database_goes_away_meanwhile(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = database_for(tmp_path / "1", url), database_for(tmp_path / "2", url)
    await first.open()
    waiting = asyncio.create_task(second.open())
    async with asyncio.timeout(60):
        while "waiting on" not in caplog.text:
            assert not waiting.done()
            break_connections(url)
            await asyncio.sleep(0.05)
        await first.close()
        await waiting
    assert await State(second, JumpingClock()).put_app(app()) == 1
    await second.close()


@needs_postgres
async def test_a_broken_connection_is_made_anew(tmp_path: Path, url: str) -> None:
    database = database_for(tmp_path, url)
    await database.open()
    state = State(database, JumpingClock())
    break_connections(url)
    with pytest.raises(ControlError, match="cannot be used"):
        await state.put_app(app())
    assert await state.put_app(app()) == 1
    await database.close()


async def test_a_database_that_cannot_be_reached_is_named_without_its_password(
    tmp_path: Path,
) -> None:
    database = database_for(tmp_path, "postgresql://me:secret@127.0.0.1:9/x?password=other")
    with pytest.raises(ControlError) as caught:
        await database.open()
    assert "postgresql://me@127.0.0.1:9/x" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "other" not in str(caught.value)
    await database.close()


@needs_postgres
async def test_the_second_control_process_serves_with_the_replicas_of_the_first(
    stand: Any, node: Any, text: Any, url: str, tmp_path: Path
) -> None:
    await stand.up(text(), database=url)
    assert (await stand.get("/smol/health"))[0] == 200
    (replica,) = node.live
    other = type(stand)(tmp_path / "other", node, stand.clock)
    waiting = asyncio.create_task(other.up(database=url))
    steal(url)
    await asyncio.wait_for(waiting, 60)
    with pytest.raises(StateLostError):
        await asyncio.wait_for(stand._task, 60)
    stand._task = None
    await stand.client.close()
    assert list(node.live) == [replica]
    headers = {"Authorization": f"Bearer {stand.key}"}  # keys are in the state
    async with other.client.get("/smol/health", headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["x-nagara-replica"] == replica
    await other.down()


@needs_postgres
async def test_a_process_that_waits_for_the_state_can_be_stopped(
    tmp_path: Path, url: str, node: Any, clock: Any, stand: Any
) -> None:
    first = database_for(tmp_path / "1", url)
    await first.open()
    waiting = asyncio.create_task(stand.up(database=url))
    while stand.control is None:
        await asyncio.sleep(0.01)
    stand.control.stop()
    await asyncio.wait_for(stand._task, 30)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    stand._task = None
    await first.close()
