"""Hooks that need no change to a server: requests, commands, and Python processes that listen."""

import asyncio
import re

import pytest

from nagara.contract.replica import HookStep, SnapshotHooks, StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


def hooked(yard, app, **hooks):
    return yard.spec(app=app, hooks=SnapshotHooks(**hooks))


async def test_requests_and_commands_are_carried_out_around_a_snapshot(shared):
    before = (
        HookStep("/rest?level=1", method="PUT", body='{"a": 1}'),
        HookStep(command=("sh", "-c", "echo before >> /srv/steps")),
    )
    after = (
        HookStep("/wake", method="PUT"),
        HookStep(command=("sh", "-c", "echo after >> /srv/steps; hostname >> /srv/steps")),
    )
    spec = hooked(shared, "stepped", before=before, after=after)
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(2)))
    code = "answer = [asked, open('/srv/steps').read().split(), open('/run/nagara/token').read()]"
    tokens = set()
    for report in reports:
        assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
        asked, steps, token = await shared.tell(report.replica, code)
        assert asked == [["/rest?level=1", '{"a": 1}', True], ["/wake", "", True]]
        assert steps == ["before", "after", report.replica]
        tokens.add(token)
    assert len(tokens) == 2
    await shared.stop(*(report.replica for report in reports))
    assert shared.leftovers() == []


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (HookStep("/deny", method="PUT"), "hook failed: /deny answered 403"),
        (HookStep(command=("sh", "-c", "echo no luck >&2; exit 3")), "no luck"),
    ],
    ids=["request", "command"],
)
async def test_a_step_that_fails_is_a_reason_and_a_plain_start(shared, step, words):
    report = await shared.capture(hooked(shared, "failing", before=(step,)))
    assert report.snapshot is None
    assert re.search(words, report.reason), report.reason
    spec = hooked(shared, "failing", after=(step,))
    assert (await shared.capture(spec)).reason is None
    started = await shared.start(spec)
    assert started.kind is StartKind.PLAIN
    assert "failed" in started.fallback
    await shared.stop(started.replica)
    assert shared.leftovers() == []


async def test_python_processes_listen_without_a_change_to_their_code(shared):
    first = "import random, os; random.seed(1); reading, writing = os.pipe()\nif os.fork() == 0:\n"
    first += "    import time\n    while not os.path.exists('/srv/go'): time.sleep(0.02)\n"
    first += "    os.write(writing, repr(random.random()).encode()); os._exit(0)"
    spec = shared.spec(
        app="injected",
        env={"FIRST": first},
        command=("python", *shared.spec().command[2:]),
        hooks=SnapshotHooks(in_python=True),
    )
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(2)))
    code = "import random; open('/srv/go', 'w').close()\n"
    code += "answer = [random.random(), os.read(reading, 100).decode()]"
    drawn = [await shared.tell(report.replica, code) for report in reports]
    assert [report.kind for report in reports] == [StartKind.RESTORED] * 2
    assert len({drawn[0][0], drawn[1][0], *(float(one) for _, one in drawn)}) == 4
    await shared.stop(*(report.replica for report in reports))
