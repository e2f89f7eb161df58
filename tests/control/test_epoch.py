"""The epochs of control: numbers that only go up, and a process that a machine refuses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from postgres_server import needs_postgres

from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError, NodeUnavailableError
from nagara.control.database import database_for
from nagara.control.epoch import begin_epoch
from nagara.control.errors import ControlError, StateLostError
from nagara.control.postgres_database import PostgresDatabase
from nagara.node.agent import AgentServer
from nagara.node.mandate import Mandate
from nagara.node.remote_node import RemoteNode


async def opened(folder: Path, address: str | None) -> ControlEpoch:
    database = database_for(folder, address)
    await database.open()
    assert database.is_held()
    await database.close()
    return database.epoch


async def test_each_holder_of_a_database_has_a_larger_number(
    tmp_path: Path, address: str | None
) -> None:
    epochs = [await opened(tmp_path, address) for _ in range(3)]
    assert len({epoch.database for epoch in epochs}) == 1
    assert epochs[0].number < epochs[1].number < epochs[2].number


async def test_numbers_go_up_whatever_the_time_of_day_does(
    tmp_path: Path, address: str | None
) -> None:
    database = database_for(tmp_path, address)
    await database.open()
    last = database.epoch.number
    for wall_s, expected in ((0.0, last + 1), (last + 100.5, last + 100), (1.0, last + 101)):
        epoch = await database.run(lambda sql, now_s=wall_s: begin_epoch(sql, now_s))
        assert epoch == ControlEpoch(database.epoch.database, expected)
    await database.close()


async def test_a_state_that_was_put_back_goes_on_above_what_it_gave_meanwhile(
    tmp_path: Path,
) -> None:
    before = await opened(tmp_path, None)
    saved = (tmp_path / "control.db").read_bytes()
    database = database_for(tmp_path, None)
    await database.open()
    meanwhile = await database.run(lambda sql: begin_epoch(sql, before.number + 50))
    await database.close()
    for file in tmp_path.glob("control.db*"):
        file.unlink()
    (tmp_path / "control.db").write_bytes(saved)
    database = database_for(tmp_path, None)
    await database.open()
    after = await database.run(lambda sql: begin_epoch(sql, before.number + 100))
    await database.close()
    assert after.database == before.database
    assert after.number > meanwhile.number


async def test_another_database_has_another_name(tmp_path: Path) -> None:
    epochs = [await opened(tmp_path / name, None) for name in "ab"]
    assert epochs[0].database != epochs[1].database


@needs_postgres
async def test_nobody_holds_a_database_by_his_own_clock_when_the_next_one_does(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = database_for(tmp_path / "1", url), database_for(tmp_path / "2", url)
    with monkeypatch.context() as hanging:
        hanging.setattr(PostgresDatabase, "_renew_for_ever", lambda *_: None)
        await first.open()
    assert first.is_held()
    await asyncio.wait_for(second.open(), 60)
    assert not first.is_held()
    assert second.is_held()
    assert second.epoch.number > first.epoch.number
    await first.close()
    assert second.is_held()
    await second.close()


# -- a whole control process over an agent ---------------------------------------------------


@pytest.fixture
async def over_agent(stand: Any, node: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """The stand, whose control reaches its node as `nagara up` does."""
    path, mandate = tmp_path / "agent.sock", Mandate()
    serving = asyncio.create_task(AgentServer(node, path).run())
    while not path.exists():
        await asyncio.sleep(0.01)
    mandate.epoch = lambda: stand.control.epoch()
    mandate.on_refused = lambda refusal: stand.control.deposed(refusal)
    stand.node = RemoteNode(path, mandate)
    yield stand
    await stand.down()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def successor(path: Path, epoch: ControlEpoch) -> RemoteNode:
    mandate = Mandate()
    mandate.epoch = lambda: ControlEpoch(epoch.database, epoch.number + 1)
    return RemoteNode(path, mandate)


async def test_a_control_process_that_a_machine_refuses_ends_and_leaves_its_replicas(
    over_agent: Any, node: Any, text: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand = over_agent
    await stand.up(text())
    assert (await stand.get("/smol/health"))[0] == 200
    (replica,) = node.live
    new = successor(tmp_path / "agent.sock", stand.control.epoch())
    await new.replicas()
    with pytest.raises(StateLostError, match="taken the state over"):
        await asyncio.wait_for(stand._task, 60)
    stand._task = None
    await stand.client.close()
    assert list(node.live) == [replica]
    assert node.stopped == []
    assert f"{tmp_path / 'agent.sock'}: a newer control process" in caplog.text
    assert caplog.text.count("leaving the replicas") == 1


async def test_what_cannot_be_written_after_the_loss_does_not_hide_it(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stand.up(text())

    async def fail(action: Any) -> None:
        raise ControlError("the state cannot be used")

    monkeypatch.setattr(stand.control.database, "run", fail)
    stand.control.database.on_lost()
    with pytest.raises(StateLostError, match="taken the state over"):
        await asyncio.wait_for(stand._task, 60)
    stand._task = None
    await stand.client.close()


async def test_a_control_process_that_is_refused_at_its_beginning_says_why(
    over_agent: Any, node: Any, tmp_path: Path
) -> None:
    epoch = await opened(over_agent.folder, None)
    ahead = ControlEpoch(epoch.database, epoch.number + 10_000)
    await successor(tmp_path / "agent.sock", ahead).stop("nobody")
    with pytest.raises((DeposedError, StateLostError)) as caught:
        await over_agent.up()
    over_agent._task = None
    assert caught.value.hint is not None


async def test_a_control_process_that_may_not_hold_the_state_any_more_asks_nothing(
    over_agent: Any, node: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = over_agent
    await stand.up(text())
    monkeypatch.setattr(stand.control.database, "is_held", lambda: False)
    with pytest.raises(NodeUnavailableError, match="lease was not renewed"):
        await stand.node.stop("nobody")
    monkeypatch.undo()
    assert (await stand.get("/smol/health"))[0] == 200
