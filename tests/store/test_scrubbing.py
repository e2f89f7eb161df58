import os
import threading
from collections.abc import Callable
from pathlib import Path

from nagara.store.names import ObjectName
from nagara.store.scrubbing import Scrub, Scrubbed, pace_for, stopping
from nagara.store.store import Store
from nagara.testing.objects import noise

StoreMaker = Callable[..., Store]


def never(_: float) -> bool:
    return False


def rot(path: Path, at: int) -> None:
    """Another byte in the file, with no trace of it in inode, size or times."""
    state = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o444)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def put(store: Store, count: int) -> list[ObjectName]:
    return sorted((store.put_bytes(noise(10_000 + seed, seed)) for seed in range(count)), key=str)


def test_a_pass_reads_everything_and_removes_what_rotted(make_store: StoreMaker) -> None:
    store = make_store()
    names = [*put(store, 20), store.put_bytes(noise((64 << 20) + 5)), store.put_bytes(b"")]
    for name in (names[3], names[20]):
        rot(store.local.path(name), name.size - 1)
    done = Scrub(store.local, None, never).run_pass()
    assert done == Scrubbed(22, sum(n.size for n in names), done.wrong, is_whole=True)
    assert set(done.wrong) == {str(names[3]), str(names[20])}
    assert [store.local.has(name) for name in names] == [
        name not in (names[3], names[20]) for name in names
    ]
    assert Scrub(store.local, None, never).run_pass().wrong == ()


def test_a_pass_that_was_stopped_goes_on_where_it_was(make_store: StoreMaker) -> None:
    store = make_store()
    names = put(store, 10)
    seconds = iter(range(0, 10_000, 10))
    pauses: list[float] = []

    def stop_at_the_fifth(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == 5

    first = Scrub(
        store.local, None, stop_at_the_fifth, monotonic_s=lambda: float(next(seconds))
    ).run_pass()
    assert (first.objects, first.is_whole) == (4, False)
    second = Scrub(store.local, None, never).run_pass()
    assert (second.objects, second.is_whole) == (6, True)
    assert second.bytes == sum(name.size for name in names[4:])
    assert Scrub(store.local, None, never).run_pass().objects == 10


def test_it_pauses_as_long_as_its_pace_asks(make_store: StoreMaker) -> None:
    store = make_store()
    large = store.put_bytes(noise((64 << 20) + 5))
    pauses: list[float] = []
    Scrub(store.local, 1e6, lambda pause_s: bool(pauses.append(pause_s))).run_pass()
    assert len(pauses) == 17  # a large object is read in pieces
    assert abs(sum(pauses) - large.size / 1e6) < 1e-6


def test_the_pace_spreads_a_pass_over_its_time(make_store: StoreMaker) -> None:
    store = make_store()
    assert pace_for(store.local, 100.0) == 1.0
    put(store, 10)
    space = store.local.folder.ledger.count("default")[1]
    assert pace_for(store.local, 100.0) == space / 100.0


def test_a_stop_ends_a_pause_at_once() -> None:
    event = threading.Event()
    wait = stopping(event)
    assert not wait(0.0)
    event.set()
    assert wait(3600.0)
    assert wait(0.0)


def test_an_object_that_vanished_is_passed_over(make_store: StoreMaker) -> None:
    store = make_store()
    names = put(store, 3)
    store.local.path(names[1]).unlink()
    assert Scrub(store.local, None, never).run_pass().objects == 2
