"""A snapshot made by one machine and put back by another: its state folder never had it.

Both are state folders of this machine; between them is a cache server, a process of its own.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import pytest_asyncio

from nagara.contract.replica import ImageOrder, StartKind
from nagara.image.images import find_image
from nagara.image.prefetch import boot_id
from nagara.image.trace import NO_TRACE, parse_touches
from nagara.node import snapshot_images
from nagara.node.replica_images import app_image
from nagara.store.roots import read_list
from nagara.testing.origin import Behaviour, running_origin

from .conftest import NAGARA, taken_down

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

APP = "travelling"
# More than a large object's limit, and the same in each capture but for where it lies.
FIRST = "import os; os.mkdir('/srv/made'); hoard = os.urandom(80 << 20)"


@contextmanager
def cache_server(state):
    """The address of a zone's cache over the store of a state folder."""
    command = [*NAGARA, "--state", str(state), "cache", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.kill()


def set_tier(yard, url):
    folder = yard.state / "store"
    folder.mkdir(exist_ok=True, mode=0o700)
    tier = {"kind": "http", "url": url, "name": "zone", "write": True}
    (folder / "settings.json").write_text(json.dumps({"tiers": [tier]}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(make_yard, tools, tmp_path_factory):
    """A machine that captured and pushed, the cache, and one that never had the snapshot."""
    one, other = make_yard(), make_yard()
    with cache_server(tmp_path_factory.mktemp("zone")) as url:
        for yard in (one, other):
            set_tier(yard, url)
            await yard.open()
        try:
            report = await one.capture(one.spec(app=APP, env={"FIRST": FIRST}))
            assert report.reason is None
            (row,) = one.command("push", APP, "--to", "zone")
            assert row["snapshot"] == report.snapshot
            assert row["moved_objects"] == row["objects"] > 5
            assert row["moved_bytes"] > 80 << 20
            yield one, other
        finally:
            for yard in (one, other):
                await taken_down(yard)


def is_local(yard):
    """All of the snapshot is there, so that no daemon is needed."""
    (root,) = yard.roots(APP)
    listing = yard.shelf().read(root.name).image.list
    ledger = yard.shelf().local.folder.ledger
    return ledger.is_complete("default", str(listing), boot_id())


async def until(condition):
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it does not come")


async def at_rest(yard):
    """Nothing is fetched any more because of earlier starts."""
    await until(lambda: not yard.node._leisure._tasks)


async def started(yard, spec):
    """A restored replica that has the captured one's memory and files; it is stopped again."""
    report = await yard.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    answer = await yard.tell(report.replica, "answer = [len(hoard), os.path.isdir('/srv/made')]")
    assert answer == [80 << 20, True]
    await yard.stop(report.replica)
    return report


async def test_another_machine_restores_what_it_never_had_lazily_and_then_locally(machines):
    one, other = machines
    spec = other.spec(app=APP, env={"FIRST": FIRST})
    assert other.roots(APP) == []
    report = await started(other, spec)
    (root,) = other.roots(APP)
    assert root.name.endswith(report.snapshot)
    assert one.roots(APP)[0].name == root.name
    layer = other.state / "files/lazy/default"
    assert layer.is_mount()  # it came through the daemon
    await until(lambda: is_local(other))
    mounted = []
    images = other.node._runtime._snapshots
    mount = images.mount
    images.mount = lambda *arguments: mounted.append(mount(*arguments)) or mounted[0]
    try:
        await started(other, spec)
    finally:
        del images.mount
    assert [each.is_lazy for each in mounted] == [False]
    assert other.leftovers() == []


async def test_a_wrong_byte_is_fetched_again_and_nobody_notices(machines):
    _, other = machines
    spec = other.spec(app=APP, env={"FIRST": FIRST})
    await started(other, spec)
    await until(lambda: is_local(other))
    for part in ("core-", "layer.erofs"):
        path = next(
            path for place, path in other.objects(other.roots(APP)[0]).items() if part in place
        )
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        await started(other, spec)
        await until(path.exists)
        content[len(content) // 2] ^= 1
        assert path.read_bytes() == content


async def test_what_a_verification_finds_is_in_quarantine_until_it_is_pulled(machines):
    _, other = machines
    spec = other.spec(app=APP, env={"FIRST": FIRST})
    await started(other, spec)
    await until(lambda: is_local(other))
    await at_rest(other)
    (root,) = other.roots(APP)
    assert other.command("verify", APP)[0]["wrong"] == []
    place, path = next(item for item in other.objects(root).items() if "pages-" in item[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert other.command("verify", APP)[0]["wrong"] == [place]
    report = await other.start(spec)
    assert (report.kind, report.fallback) == (StartKind.PLAIN, "its snapshot is in quarantine")
    await other.stop(report.replica)
    (row,) = other.command("pull", APP)
    assert row["moved_objects"] == 1
    await started(other, spec)


async def test_a_snapshot_that_was_removed_comes_from_elsewhere_again(machines):
    one, other = machines
    spec = other.spec(app=APP, env={"FIRST": FIRST})
    await started(other, spec)
    other.command("rm", APP)
    assert other.roots(APP) == []
    await started(other, spec)
    (row,) = one.command("rm", APP, "--from", "zone")
    assert one.roots(APP)[0].name.endswith(row["snapshot"])
    other.command("rm", APP)
    report = await other.start(spec)
    assert (report.kind, report.fallback) == (StartKind.PLAIN, "there is no snapshot yet")
    await other.stop(report.replica)
    one.command("push", APP, "--to", "zone")
    await started(other, spec)


async def test_what_was_evicted_is_fetched_again_but_not_what_a_replica_holds(machines):
    _, other = machines
    spec = other.spec(app=APP, env={"FIRST": FIRST})
    await started(other, spec)
    await until(lambda: is_local(other))
    replica = (await other.start(spec)).replica
    await at_rest(other)
    objects = other.objects(other.roots(APP)[0])
    folder = other.shelf().local.folder
    folder.relieve(1 << 40)
    assert all(path.exists() for path in objects.values())
    await other.stop(replica)
    folder.relieve(1 << 40)
    assert not any(path.exists() for path in objects.values())
    await started(other, spec)
    await until(lambda: is_local(other))


async def test_a_snapshot_of_an_image_is_restored_where_the_same_image_was_brought(
    machines, tmp_path_factory
):
    one, other = machines
    venv = tmp_path_factory.mktemp("tree") / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    source = f"venv:{venv}"
    specs = []
    for yard in (one, other):
        brought = await yard.node.bring_image(ImageOrder("default", "imaged", source))
        changes = {"image": source, "image_index": brought.index}
        specs.append(yard.spec(app="imaged", env={"FIRST": "place = 'first'"}, **changes))
    assert specs[0].image_index == specs[1].image_index
    shutil.rmtree(venv)  # what was saved is of the image, not of this machine
    assert (await one.capture(specs[0])).reason is None
    one.command("push", "imaged", "--to", "zone")
    report = await other.start(specs[1])
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    assert await other.tell(report.replica, "answer = place") == "first"

    (root,) = other.roots("imaged")
    try:  # what the next machine fetches before it starts
        await until(lambda: parse_touches(other.about(root)["touches"]) != NO_TRACE)
    finally:
        await other.stop(report.replica)
    store = other.shelf().store
    listed = read_list(store, find_image(store, app_image("imaged", specs[1].image_index)).list)
    excerpts = parse_touches(other.about(root)["touches"]).excerpts
    assert excerpts is not None
    touched = {name for name, _ in excerpts.members}
    assert touched <= set(listed)
    assert max(name.size for name in touched) > 1 << 20, "not even the interpreter"
    kept = sum(name.size for name in excerpts.objects)
    assert 0 < kept < sum(name.size for name in touched)


async def test_what_does_not_come_from_the_tier_is_not_held_against_the_snapshot(
    machines, make_yard, monkeypatch
):
    one, _ = machines
    third = make_yard()
    far = third.state / "far"
    far.mkdir()
    with running_origin(far) as origin:
        settings = json.loads((one.state / "store/settings.json").read_text())
        settings["tiers"].append({"kind": "folder", "path": str(far)})
        (one.state / "store/settings.json").write_text(json.dumps(settings))
        one.command("push", APP, "--to", "folder")
        set_tier(third, origin.url)
        await third.open()
        try:
            spec = third.spec(app=APP, env={"FIRST": FIRST}, start_timeout_s=120.0)
            for _ in range(3):
                origin.behave(Behaviour(lie=True, only="sha256", from_bytes=1 << 20))
                report = await third.start(spec)
                assert report.kind is StartKind.PLAIN
                assert "could not be fetched" in report.fallback
                await third.stop(report.replica)
                assert third.leftovers() == []
            (root,) = third.roots(APP)
            index = third.shelf().read(root.name).image.index
            third.command("rm", APP)
            monkeypatch.setattr(snapshot_images, "_INDEX_S", 0.3)
            origin.behave(Behaviour(stall_after=0, only=str(index)))
            report = await third.start(spec)
            assert report.kind is StartKind.PLAIN
            assert "time" in report.fallback
            await third.stop(report.replica)
            monkeypatch.undo()
            origin.behave(Behaviour())
            await started(third, spec)
        finally:
            await taken_down(third)
