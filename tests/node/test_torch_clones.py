"""Clones of one process with torch and numpy, put back at once: each draws numbers of its own."""

import asyncio
import dataclasses

import pytest

from nagara.contract.replica import SnapshotHooks, StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

CLONES = 4
# All generators are in use before, and seeded alike.
FIRST = """
import random, ssl, uuid
import numpy, torch
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
uuid.uuid4(), random.random(), ssl.RAND_bytes(8), numpy.random.random(), torch.rand(1)
"""
DRAW = """
answer = {
    "uuid4": uuid.uuid4().hex,
    "random": random.random(),
    "urandom": os.urandom(8).hex(),
    "getrandom": os.getrandom(8).hex(),
    "ssl": ssl.RAND_bytes(8).hex(),
    "numpy": numpy.random.random(),
    "torch": torch.rand(1).item(),
}
"""


@pytest.mark.parametrize("way", ["hooks of its own", "preset"])
async def test_four_at_once_draw_different_numbers_from_every_generator(shared, way):
    if way == "preset":
        command = ("python", "-c", shared.spec().command[-1])
        hooks = SnapshotHooks(in_python=True)
        spec = shared.spec(app="preset", command=command, hooks=hooks, env={"FIRST": FIRST})
    else:
        spec = shared.spec(app="own", env={"HOOKS": "1", "FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(CLONES)))
    assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * CLONES
    replicas = [report.replica for report in reports]
    drawn = await asyncio.gather(*(shared.tell(replica, DRAW) for replica in replicas))
    for kind in drawn[0]:
        assert len({answer[kind] for answer in drawn}) == CLONES, kind
    await shared.stop(*replicas)


async def test_what_is_not_told_of_the_restore_draws_the_same(shared):
    """So that the test above sees what would be wrong: here nobody listens."""
    command = ("python", "-c", shared.spec().command[-1])
    spec = shared.spec(app="deaf", command=command, env={"FIRST": FIRST})
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(2)))
    drawn = [await shared.tell(report.replica, DRAW) for report in reports]
    for kind in ("random", "numpy", "torch"):
        assert drawn[0][kind] == drawn[1][kind], kind
    assert drawn[0]["urandom"] != drawn[1]["urandom"]  # the kernel's own
    await shared.stop(*(report.replica for report in reports))


async def test_starts_at_the_same_time_look_for_their_snapshot_once(shared, monkeypatch):
    spec = shared.spec(app="looked-for")
    assert (await shared.capture(spec)).reason is None
    snapshots, looks = shared.node._snapshots, []
    look = snapshots._find

    def counted(asked):
        looks.append(asked)
        return look(asked)

    monkeypatch.setattr(snapshots, "_find", counted)
    found = await asyncio.gather(*(snapshots.find(spec) for _ in range(CLONES)))
    assert len(looks) == 1
    assert len({one.name for one in found}) == 1
    cancelled = asyncio.create_task(snapshots.find(spec))
    other = asyncio.create_task(snapshots.find(spec))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await other).name == found[0].name  # one that leaves takes nobody along
    assert len(looks) == 2
    await snapshots.find(dataclasses.replace(spec, port=9000))
    assert len(looks) == 3
