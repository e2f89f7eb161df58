"""What a start is known to read comes before it begins, from afar, in order."""

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.image.excerpts import STRETCH_BYTES, Excerpts, make_excerpts
from nagara.image.images import find_image
from nagara.image.index_reader import read_index
from nagara.image.mounts import object_behind
from nagara.image.trace import Trace
from nagara.image.tree import walk
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.testing.objects import noise, put_object
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


def all_gathered(machine: Any, wanted: Trace) -> Any:
    """Until nothing is under way any more: who waits goes on a moment before that."""
    gathering, _ = gathered(machine, wanted)
    wait_for(lambda: not machine.mounts.gathered(gathering, 0.0).is_running)
    return gathering, machine.mounts.gathered(gathering, 0.0)


def excerpts_of(maker: Any, origin: Origin, **stretches: list[int]) -> Excerpts:
    """Made where the image was made, and put on the origin."""
    store, objects = maker.store(), objects_of(maker)
    excerpts = make_excerpts(store, {objects[name]: each for name, each in stretches.items()})
    assert excerpts is not None
    for name in excerpts.objects:
        put_object(origin.root, store.read(name))
    return excerpts


def test_what_was_gathered_is_read_without_asking_anybody(
    other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    objects = objects_of(other)
    large, medium = objects["large"], objects["medium"]
    wanted = Trace(((medium, ()), (large, tuple(range(large.chunk_count)))))
    gathering, progress = all_gathered(other, wanted)
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
    gathering, progress = all_gathered(other, Trace(((large, (2, 16)),)))
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
    _, progress = all_gathered(other, Trace(((absent, ()), (medium, ()))))
    assert (progress.left, progress.left_bytes) == (0, 0)
    assert str(absent) in progress.error
    assert other.store().local.has(medium)


def test_wrong_bytes_do_not_become_an_object(other: Any, far: Origin) -> None:
    medium = objects_of(other)["medium"]
    far.behave(Behaviour(lie=True, only=str(medium)))
    _, progress = all_gathered(other, Trace(((medium, ()),)))
    assert progress.error is not None
    assert not other.store().local.has(medium)


def test_where_objects_are_not_proven_nothing_is_read_past_the_daemon(
    other: Any, source: Path, tmp_path: Path
) -> None:
    objects = objects_of(other)
    local = other.store().local
    local.path(objects["folder/in it"]).write_bytes(b"rotten")
    gathering, _ = all_gathered(other, Trace(((objects["medium"], ()),)))
    assert gathering.passing == ()
    other.show(tmp_path / "mnt", gathering=gathering)
    for name in ("medium", "folder/in it"):
        assert (tmp_path / "mnt" / name).read_bytes() == (source / name).read_bytes()


def test_of_a_file_with_an_excerpt_nothing_else_is_fetched_before_it_is_read(
    maker: Any, other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    last = (64 << 20) // STRETCH_BYTES  # a short one
    excerpts = excerpts_of(maker, far, large=[0, 1, 100, last], medium=[2])
    large, medium = objects_of(other)["large"], objects_of(other)["medium"]
    gathering, progress = all_gathered(other, Trace((), excerpts=excerpts))
    assert (progress.left, progress.error) == (0, None)
    other.show(tmp_path / "mnt", gathering=gathering)
    far.counters(reset=True)
    with (tmp_path / "mnt/large").open("rb") as file, (source / "large").open("rb") as right:
        for start, length in ((0, 131072), (6553600, 65536), (64 << 20, 4321), (66000, 10)):
            assert os.pread(file.fileno(), length, start) == os.pread(right.fileno(), length, start)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[6553600:6619136] == os.pread(right.fileno(), 65536, 6553600)
        mapped.close()
    assert far.counters()["requests"] == {}
    with (tmp_path / "mnt/medium").open("rb") as file:
        assert far.counters()["requests"] == {}, "it was only opened"
        assert file.read() == (source / "medium").read_bytes()
    assert other.store().local.has(medium)
    assert not other.store().local.has(large)
    assert (tmp_path / "mnt/large").read_bytes() == (source / "large").read_bytes()


def test_where_the_files_are_here_their_excerpts_are_not_fetched(
    maker: Any, other: Any, far: Origin
) -> None:
    excerpts = excerpts_of(maker, far, medium=[0])
    medium = objects_of(other)["medium"]
    other.store().ensure(medium)
    assert other.mounts.gather("default", HOLDER, Trace((), excerpts=excerpts)) is None


def test_an_excerpt_that_cannot_be_had_is_done_without(
    maker: Any, other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    excerpts = excerpts_of(maker, far, medium=[0], large=[3])
    for name in excerpts.objects:
        (far.root / "default" / name.key).unlink()
    gathering, progress = all_gathered(other, Trace((), excerpts=excerpts))
    assert progress.error is not None
    other.show(tmp_path / "mnt", gathering=gathering)
    for name in ("medium", "large"):
        assert (tmp_path / "mnt" / name).read_bytes() == (source / name).read_bytes()


def test_a_daemon_that_took_over_does_without_excerpts(
    maker: Any, other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    excerpts = excerpts_of(maker, far, medium=[0], large=[3])
    gathering, _ = all_gathered(other, Trace((), excerpts=excerpts))
    other.show(tmp_path / "mnt", gathering=gathering)
    os.kill(other.daemon_pid(), signal.SIGKILL)
    other.mounts.expect("default")
    gathering, progress = all_gathered(other, Trace((), excerpts=excerpts))
    assert progress.error is None
    for name in ("medium", "large"):
        assert (tmp_path / "mnt" / name).read_bytes() == (source / name).read_bytes()


def test_a_holder_that_is_gone_has_no_excerpts(
    maker: Any, other: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    excerpts = excerpts_of(maker, far, medium=[0])
    gathering, _ = all_gathered(other, Trace((), excerpts=excerpts))
    other.show(tmp_path / "mnt", gathering=gathering)
    other.mounts.lazy_layer("default").ask({"op": "forget", "name": HOLDER})
    with (tmp_path / "mnt/medium").open("rb"):
        assert other.store().local.has(objects_of(other)["medium"])


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
