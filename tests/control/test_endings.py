"""Ends of replicas and apps that do not work at once: nothing is forgotten meanwhile."""

import asyncio
import sqlite3
from typing import Any

import pytest

from nagara.contract.node import NodeError, NodeUnavailableError
from nagara.control import tasks
from nagara.control.sqlite_database import SqliteDatabase


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RETRY_S", 0.01)


async def test_a_stop_that_fails_keeps_the_slot_until_it_works(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.up(text(), text("other"), slots=1)
    assert (await stand.get("/smol/health"))[0] == 200
    stop, failures = stand.node.stop, [NodeError("runc delete failed"), NodeUnavailableError("x")]

    async def fail_first(replica: str, **arguments: float) -> None:
        if failures:
            raise failures.pop()
        await stop(replica, **arguments)

    monkeypatch.setattr(stand.node, "stop", fail_first)
    async with asyncio.timeout(20):
        await stand.admin("POST", "/api/apps/smol/fold")
        assert failures == []
        assert (await stand.get("/other/health"))[0] == 200
    assert stand.node.most_live == 1


async def test_an_app_deleted_while_the_node_is_away_is_deleted_in_full(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.up(text())
    assert (await stand.get("/smol/health"))[0] == 200
    forget, failures = stand.node.forget_app, [NodeUnavailableError("the agent is starting")]

    async def fail_first(tenant: str, app: str) -> None:
        if failures:
            raise failures.pop()
        await forget(tenant, app)

    monkeypatch.setattr(stand.node, "forget_app", fail_first)
    await stand.admin("DELETE", "/api/apps/smol")
    assert stand.node.forgotten == [("default", "smol")]
    await stand.down()
    await stand.up()
    assert (await stand.admin("GET", "/api/apps"))["apps"] == []


async def test_a_replica_that_cannot_be_stopped_keeps_no_control_from_beginning(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.up(text())
    assert (await stand.get("/smol/health"))[0] == 200
    (old,) = stand.node.live
    await stand.down(keep=True)
    stop, failures = stand.node.stop, [NodeError("runc delete failed")]

    async def fail_first(replica: str, **arguments: float) -> None:
        if failures and replica == old:
            raise failures.pop()
        await stop(replica, **arguments)

    monkeypatch.setattr(stand.node, "stop", fail_first)
    monkeypatch.setattr("nagara.control.fleet.Fleet.adopt", lambda *_: False)
    await stand.up()
    assert failures == []
    assert (await stand.get("/smol/health"))[0] == 200


async def test_a_state_that_cannot_be_written_wedges_no_app(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    connections = []
    connect = SqliteDatabase._connect

    def connect_seen(self: SqliteDatabase) -> sqlite3.Connection:
        connections.append(connect(self))
        return connections[-1]

    monkeypatch.setattr(SqliteDatabase, "_connect", connect_seen)
    await stand.up(text(), slots=1)
    assert (await stand.get("/smol/health"))[0] == 200
    connections[0].execute("PRAGMA query_only = ON")
    async with asyncio.timeout(20):
        await stand.admin("POST", "/api/apps/smol/fold")
        assert not stand.node.live
        status, body = await stand.get("/smol/health")
        assert status == 503
        assert b"the state cannot be used" in body
    connections[0].execute("PRAGMA query_only = OFF")

    async def serves() -> bool:
        return (await stand.get("/smol/health"))[0] == 200

    await until(serves)
    assert list(stand.node.live) == stand.node.started[1:]
