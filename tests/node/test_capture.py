"""Captures that cannot be made: a reason in words, and nothing left."""

import asyncio
import re

import pytest

from nagara.contract.node import StartFailedError
from nagara.contract.replica import Canary, StartKind
from nagara.node.image_mounts import open_image_mounts

from .conftest import taken_down

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            "import os; open('/srv/a', 'w').close(); os.link('/srv/a', '/srv/b');"
            "held = open('/srv/b'); os.unlink('/srv/b')",
            "link-remap",
        ),
        (
            "import os; deleted = open('/srv/deleted', 'wb+');"
            "os.posix_fallocate(deleted.fileno(), 0, 300 << 20); os.unlink('/srv/deleted')",
            "ghost",
        ),
        (
            "import ctypes, os; watch = ctypes.CDLL(None).inotify_init();"
            "ctypes.CDLL(None).inotify_add_watch(watch, b'/usr/lib', 2)",
            "inotify|watch|handle|path",
        ),
    ],
    ids=["link", "large deleted file", "inotify"],
)
async def test_what_the_checkpoint_tool_cannot_save_is_named(shared, first, words):
    report = await shared.capture(shared.spec(env={"FIRST": first}))
    if report.snapshot is not None and "inotify" in first:
        return  # newer tools can
    assert report.snapshot is None
    assert re.search(words, report.reason, re.IGNORECASE), report.reason
    assert "FAILED" not in report.reason
    assert report.elapsed_s > 0
    assert shared.leftovers() == []


async def test_a_canary_that_answers_differently_each_time_is_refused(shared):
    first = "import itertools; count = itertools.count(); canary = lambda: str(next(count))"
    report = await shared.capture(shared.spec(env={"FIRST": first}))
    assert report.snapshot is None
    assert "another answer each time" in report.reason
    assert "hint: set snapshot.canary" in report.reason
    assert shared.leftovers() == []


async def test_a_canary_that_answers_an_error_is_refused(shared):
    spec = shared.spec(canary=Canary("/canary", "not json"))
    report = await shared.capture(spec)
    assert report.snapshot is None
    assert "answered 500" in report.reason


async def test_a_hook_that_fails_prevents_the_capture_with_its_words(shared):
    first = "hooks.before_snapshot(lambda: 1 / 0)"
    report = await shared.capture(shared.spec(env={"HOOKS": "1", "FIRST": first}))
    assert report.snapshot is None
    assert "division by zero" in report.reason
    assert shared.leftovers() == []


async def test_a_hook_runs_before_the_save_and_not_in_the_clone(shared):
    first = "calls = []; hooks.before_snapshot(lambda: calls.append('before'));"
    first += "hooks.after_restore(lambda: calls.append('after'))"
    spec = shared.spec(app="hooked", env={"HOOKS": "1", "FIRST": first})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert report.kind is StartKind.RESTORED
    assert await shared.tell(report.replica, "answer = calls") == ["before", "after"]
    await shared.stop(report.replica)


async def test_a_hook_that_fails_after_a_restore_leads_to_a_plain_start(shared):
    first = "hooks.after_restore(lambda: open('/nowhere/at/all'))"
    spec = shared.spec(app="badly-hooked", env={"HOOKS": "1", "FIRST": first})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert report.kind is StartKind.PLAIN
    assert "/nowhere/at/all" in report.fallback
    await shared.stop(report.replica)


async def test_a_replica_that_ends_in_the_middle_of_a_capture_is_a_reason(shared):
    first = "import os; hooks.before_snapshot(lambda: os._exit(3))"
    report = await shared.capture(shared.spec(env={"HOOKS": "1", "FIRST": first}))
    assert report.snapshot is None
    assert "before_snapshot" in report.reason
    assert shared.leftovers() == []


async def test_a_capture_replica_that_never_gets_ready_is_a_failed_start(shared):
    spec = shared.spec(command=("sleep", "72"), start_timeout_s=0.5)
    with pytest.raises(StartFailedError, match="not answered"):
        await shared.capture(spec)
    assert shared.leftovers() == []


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1])
async def test_a_capture_cancelled_at_any_moment_leaves_nothing(shared, after_s):
    spec = shared.spec(app=f"cancelled-{after_s}", env={"FIRST": "hoard = b'x' * (200 << 20)"})
    capturing = asyncio.ensure_future(shared.capture(spec))
    await asyncio.sleep(after_s)
    capturing.cancel()
    await asyncio.wait([capturing])
    assert shared.leftovers() == []
    assert await shared.node.replicas() == ()


async def test_a_capture_that_is_stopped_is_a_failed_start(shared):
    name = shared.name()
    capturing = asyncio.ensure_future(shared.capture(shared.spec(env={"WAIT_S": "20"}), name))
    await asyncio.sleep(0.3)
    await shared.node.stop(name)
    with pytest.raises(StartFailedError, match="stopped"):
        await capturing
    assert shared.leftovers() == []


async def test_two_captures_of_one_app_leave_one_snapshot(shared):
    spec = shared.spec(app="twice")
    for _ in range(2):
        assert (await shared.capture(spec)).reason is None
    assert len(shared.roots("twice")) == 1
    report = await shared.start(spec)
    assert report.kind is StartKind.RESTORED
    await shared.stop(report.replica)


@pytest.mark.parametrize("method", ["tree", "checkout"])
async def test_a_machine_without_data_layers_shows_a_snapshot_in_another_way(
    make_yard, tools, method
):
    yard = make_yard()
    try:
        await yard.open()
        yard.node._images._open_mounts = lambda: open_image_mounts(yard.state, method=method)
        spec = yard.spec(app=method, env={"FIRST": "import os; os.mkdir('/srv/made')"})
        assert (await yard.capture(spec)).reason is None
        for _ in range(2):
            report = await yard.start(spec)
            assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
            assert "made" in await yard.tell(report.replica, "answer = os.listdir('/srv')")
            await yard.stop(report.replica)
        assert yard.leftovers() == []
    finally:
        await taken_down(yard)
