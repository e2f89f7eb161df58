"""Whose orders a machine takes: what is remembered, and calls that meet at the border."""

import asyncio
import json
import threading

import pytest

from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError
from nagara.node import control_epochs
from nagara.node.control_epochs import MOST_DATABASES, ControlEpochs


def epoch(number, database="one"):
    return ControlEpoch(database, number)


@pytest.fixture
def file(tmp_path):
    return tmp_path / control_epochs.FILE_NAME


async def test_an_agent_that_was_started_again_still_refuses(file):
    await ControlEpochs(file).admit(epoch(5), "stop")
    await ControlEpochs(file).admit(epoch(3, "two"), "stop")
    again = ControlEpochs(file)
    for older in (epoch(4), epoch(2, "two")):
        with pytest.raises(DeposedError):
            await again.admit(older, "facts")
    with pytest.raises(DeposedError, match="with an epoch only"):
        await again.admit(None, "stop")
    await again.admit(epoch(5), "stop")


async def test_what_may_be_done_under_an_epoch_is_on_the_disk_before(file):
    await ControlEpochs(file).admit(epoch(5), "facts")
    assert json.loads(file.read_text()) == {"one": 5}


async def test_while_a_newer_epoch_is_recorded_older_calls_are_admitted_and_then_ended(
    file, monkeypatch
):
    is_recording, may_go_on = threading.Event(), threading.Event()

    def write(path, data):
        is_recording.set()
        assert may_go_on.wait(60)
        path.write_bytes(data)

    epochs = ControlEpochs(file)
    before = await epochs.admit(epoch(1), "stop")
    monkeypatch.setattr(control_epochs, "write_durably", write)
    newer = [asyncio.create_task(epochs.admit(epoch(2), "stop")) for _ in range(3)]
    assert await asyncio.to_thread(is_recording.wait, 60)
    meanwhile = await epochs.admit(epoch(1), "stop")
    newest = asyncio.create_task(epochs.admit(epoch(3), "stop"))
    await asyncio.sleep(0)
    assert not any(one.done() for one in (before, meanwhile, newest, *newer))
    may_go_on.set()
    ends = await asyncio.gather(*newer, return_exceptions=True)
    assert before.done()
    assert meanwhile.done()
    is_now = await newest
    # Those of the second that came through before the third are over now; the others never were.
    assert all(isinstance(end, DeposedError) or end.done() for end in ends)
    assert not is_now.done()


async def test_calls_of_other_databases_and_looks_of_nobody_go_on(file):
    epochs = ControlEpochs(file)
    order = await epochs.admit(None, "stop")
    look = await epochs.admit(None, "exits")
    other = await epochs.admit(epoch(9, "two"), "stop")
    assert order.done()
    await epochs.admit(epoch(1), "stop")
    await epochs.admit(epoch(2), "stop")
    assert not look.done()
    assert not other.done()


async def test_databases_that_have_not_called_for_long_are_forgotten(file):
    epochs = ControlEpochs(file)
    for number in range(MOST_DATABASES + 5):
        await epochs.admit(epoch(9, f"d{number}"), "facts")
        await epochs.admit(epoch(number + 1, "one"), "facts")
    kept = json.loads(file.read_text())
    assert len(kept) == MOST_DATABASES
    assert kept["one"] == MOST_DATABASES + 5
    assert "d0" not in kept


@pytest.mark.parametrize("content", [b"", b"[]", b'{"one": "x"}', b'{"one": null}', b"\xff"])
async def test_a_damaged_file_is_told_and_locks_nobody_out(file, caplog, content):
    file.write_bytes(content)
    await ControlEpochs(file).admit(epoch(1), "stop")
    assert "forgotten" in caplog.text
    assert str(file) in caplog.text


async def test_a_full_disk_locks_nobody_out(tmp_path, caplog):
    epochs = ControlEpochs(tmp_path / "absent" / "file")
    await epochs.admit(epoch(2), "stop")
    assert "not recorded" in caplog.text
    with pytest.raises(DeposedError):
        await epochs.admit(epoch(1), "stop")
