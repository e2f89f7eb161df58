"""What a start is known to read comes before it begins, from afar, in order."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.image.images import find_image
from nagara.image.index_reader import read_index
from nagara.image.mounts import object_behind
from nagara.image.trace import Trace
from nagara.image.tree import walk
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin

pytestmark = pytest.mark.root
HOLDER = "start"


def objects_of(machine: Any) -> dict[str, ObjectName]:
    """By their paths in the image."""
    store = machine.store()
    tree = read_index(store.read(find_image(store, "image").index))
    return {path.decode(): node.content for path, node in walk(tree) if node.content is not None}


@pytest.fixture
def other(maker: Any, make_far_machine: Callable[..., Any]) -> Any:
    """A machine that has nothing, and a running daemon."""
    machine = make_far_machine()
    machine.mounts.expect("default")
    return machine


def gathered(machine: Any, wanted: Trace, limit_s: float = 60.0) -> Any:
    gathering = machine.mounts.gather("default", HOLDER, wanted)
    assert gathering is not None
    return gathering, machine.mounts.gathered(gathering, limit_s)


def test_what_was_gathered_is_read_without_asking_anybody(
    other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    objects = objects_of(other)
    large, medium = objects["large"], objects["medium"]
    wanted = Trace(((medium, ()), (large, tuple(range(large.chunk_count)))))
    gathering, progress = gathered(other, wanted)
    assert (progress.left, progress.left_bytes, progress.error) == (0, 0, None)
    assert (progress.objects, progress.bytes) == (2, medium.size + large.size)
    assert gathering.passing == (other.store().local.objects,)
    mounted = other.show(tmp_path / "mnt", gathering=gathering)
    assert mounted.is_lazy
    far.counters(reset=True)
    other.mounts.lazy_layer("default").ask({"op": "record", "name": "see", "list": str(
        mounted.image.list)})  # fmt: skip
    for name in ("large", "medium"):
        assert (tmp_path / "mnt" / name).read_bytes() == (source / name).read_bytes()
    assert far.counters()["requests"] == {}
    seen = other.mounts.lazy_layer("default").ask({"op": "recorded", "name": "see"})
    assert seen["touches"] == [], "the daemon was asked"
    assert other.mounts.gather("default", HOLDER, wanted) is None  # there is nothing to fetch


def test_of_a_large_object_only_the_named_chunks_come(
    other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    large = objects_of(other)["large"]
    far.counters(reset=True)
    gathering, progress = gathered(other, Trace(((large, (2, 16)),)))
    last_bytes = large.size - 16 * CHUNK_BYTES
    assert (progress.left, progress.bytes) == (0, CHUNK_BYTES + last_bytes)
    assert far.counters()["bytes"] < CHUNK_BYTES + last_bytes + 100_000
    other.show(tmp_path / "mnt", gathering=gathering)
    assert (tmp_path / "mnt/large").read_bytes() == (source / "large").read_bytes()


def test_who_waits_goes_on_when_the_line_is_too_slow(other: Any, far: Origin) -> None:
    large = objects_of(other)["large"]
    far.behave(Behaviour(link_bytes_s=8e6))
    wanted = Trace(((large, tuple(range(large.chunk_count))),))
    _, progress = gathered(other, wanted, limit_s=4.0)  # it would take eight seconds
    assert progress.is_running
    assert progress.left_bytes > large.size // 2
    far.behave(Behaviour())
    wait_for(lambda: other.store().local.has(large))


def test_nobody_waits_longer_than_asked_for_what_does_not_come(other: Any, far: Origin) -> None:
    medium = objects_of(other)["medium"]
    far.behave(Behaviour(latency_s=3.0))
    for limit_s in (0.0, 1.0):
        _, progress = gathered(other, Trace(((medium, ()),)), limit_s=limit_s)
        assert progress.is_running
    wait_for(lambda: other.store().local.has(medium))


def test_what_cannot_be_had_is_said_and_the_rest_comes(other: Any) -> None:
    absent, medium = name_bytes(noise(5000, 77)), objects_of(other)["medium"]
    _, progress = gathered(other, Trace(((absent, ()), (medium, ()))))
    assert (progress.left, progress.left_bytes) == (0, 0)
    assert str(absent) in progress.error
    assert other.store().local.has(medium)


def test_wrong_bytes_do_not_become_an_object(other: Any, far: Origin) -> None:
    medium = objects_of(other)["medium"]
    far.behave(Behaviour(lie=True, only=str(medium)))
    _, progress = gathered(other, Trace(((medium, ()),)))
    assert progress.error is not None
    assert not other.store().local.has(medium)


def test_where_objects_are_not_proven_nothing_is_read_past_the_daemon(
    other: Any, source: Path, tmp_path: Path
) -> None:
    objects = objects_of(other)
    local = other.store().local
    local.path(objects["folder/in it"]).write_bytes(b"rotten")
    gathering, _ = gathered(other, Trace(((objects["medium"], ()),)))
    assert gathering.passing == ()
    other.show(tmp_path / "mnt", gathering=gathering)
    for name in ("medium", "folder/in it"):
        assert (tmp_path / "mnt" / name).read_bytes() == (source / name).read_bytes()


def test_the_object_behind_a_file_is_found_through_the_stack(
    maker: Any, make_machine: Callable[..., Any], tmp_path: Path
) -> None:
    mounted = maker.show(tmp_path / "mnt")
    above = tmp_path / "above"
    (above / "bin").mkdir(parents=True)
    (above / "bin/true").write_bytes(b"not of the image")
    objects = objects_of(maker)
    assert object_behind(mounted.layers, "/medium") == objects["medium"]
    assert object_behind(mounted.layers, "/folder/in it") == objects["folder/in it"]
    for path in ("/small", "/link", "/bin", "/nothing", "/medium/below"):
        assert object_behind(mounted.layers, path) is None, path
    assert object_behind((above, *mounted.layers), "/bin/true") is None
    assert object_behind((above, *mounted.layers), "/medium") == objects["medium"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
