"""What is fetched ahead of need: in which order, and how much of it at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.image import prefetch
from nagara.image.prefetch import AT_ONCE, Prefetcher, at_once_bytes
from nagara.image.trace import Trace, whole
from nagara.store.chunk_file import ChunkFile
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.store.roots import put_list
from nagara.store.store import Store
from nagara.testing.objects import chunk_list, noise
from nagara.testing.origin import Behaviour, Origin
from nagara.testing.tiers import ScriptedTier

LARGE = noise((64 << 20) + 12345, 1)
WAIT_S = 60


class Held:
    """Holds back every answer but chunk lists until it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, key: str, number: int, data: bytes) -> bytes:
        if key.startswith("sha256/"):
            self.asked.release()
            assert self.go.wait(WAIT_S)
        return data


@pytest.fixture
def tier() -> ScriptedTier:
    return ScriptedTier()


@pytest.fixture
def far_store(tier: ScriptedTier, tmp_path: Path) -> Iterator[Store]:
    folder = ObjectFolder(tmp_path / "near")
    store = Store(folder.tenant("default"), [tier])
    yield store
    store.close()
    folder.close()


def put(tier: ScriptedTier, content: bytes) -> ObjectName:
    name = name_bytes(content)
    tier.content[name.key] = content
    if name.is_chunked:
        tier.content[name.list_key] = chunk_list(content).to_bytes()
    return name


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_chunks_of_one_object_are_fetched_side_by_side_and_only_those_of_the_trace(
    tier: ScriptedTier, far_store: Store
) -> None:
    tier.interfere = held = Held()
    name = put(tier, LARGE)
    prefetcher = Prefetcher(far_store)
    prefetcher.start_trace("job", lambda: Trace(((name, (9, 2, 5)),)))
    for _ in range(3):
        assert held.asked.acquire(timeout=WAIT_S)
    assert prefetcher.progress("job").is_running
    held.go.set()
    wait_until(lambda: not prefetcher.progress("job").is_running)
    progress = prefetcher.progress("job")
    assert (progress.objects, progress.left, progress.error) == (1, 0, None)
    assert progress.bytes == 3 * CHUNK_BYTES
    starts = [start for key, start, _ in tier.reads if key == name.key]
    assert sorted(starts) == [2 * CHUNK_BYTES, 5 * CHUNK_BYTES, 9 * CHUNK_BYTES]


def test_from_near_what_is_needed_first_does_not_share_the_line_with_all_the_rest(
    tier: ScriptedTier, far_store: Store
) -> None:
    tier.interfere = held = Held()
    name = put(tier, LARGE)
    prefetcher = Prefetcher(far_store)
    order = (7, 3, 11, 0, 5, 9, 2, 12)
    prefetcher.start_trace("job", lambda: Trace(((name, order),)), 0.0)
    for _ in range(at_once_bytes(0.0) // CHUNK_BYTES):
        assert held.asked.acquire(timeout=WAIT_S)
    first = [start // CHUNK_BYTES for key, start, _ in tier.reads if key == name.key]
    assert sorted(first) == sorted(order[: len(first)])
    held.go.set()
    wait_until(lambda: not prefetcher.progress("job").is_running)
    assert prefetcher.progress("job").left == 0


def test_two_jobs_of_one_name_do_not_count_each_others_work(
    tier: ScriptedTier, far_store: Store
) -> None:
    tier.interfere = held = Held()
    names = [put(tier, noise(5000, seed)) for seed in range(4)]
    listing = put_list(far_store, names)
    prefetcher = Prefetcher(far_store)
    prefetcher.start_trace("job", lambda: Trace(tuple((name, ()) for name in names)))
    assert held.asked.acquire(timeout=WAIT_S)
    prefetcher.start_fill("job", listing)
    wait_until(lambda: prefetcher.progress("job").left > 0)
    held.go.set()
    wait_until(lambda: not prefetcher.progress("job").is_running)
    progress = prefetcher.progress("job")
    assert (progress.left, progress.error) == (0, None)
    assert all(far_store.local.has(name) for name in names)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_only_what_is_waited_for_goes_through_the_cache_of_its_own_file(
    tier: ScriptedTier, far_store: Store, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    past_the_cache: list[int] = []
    write = ChunkFile.write

    def counted(file: ChunkFile, start: int, data: memoryview) -> None:
        past_the_cache.append(start)
        write(file, start, data)

    monkeypatch.setattr(ChunkFile, "write", counted)
    tier.interfere = held = Held()
    name = put(tier, LARGE)
    prefetcher = Prefetcher(far_store)
    prefetcher.start_gather("job", Trace(((name, tuple(range(name.chunk_count))),)), 0.0)
    at_once = at_once_bytes(0.0) // CHUNK_BYTES
    for _ in range(at_once):
        assert held.asked.acquire(timeout=WAIT_S)
    waiting = threading.Thread(target=prefetcher.gathered, args=("job", WAIT_S * is_awaited))
    waiting.start()
    if is_awaited:
        wait_until(lambda: prefetcher._jobs["job"].is_awaited)
    held.go.set()
    wait_until(lambda: not prefetcher.progress("job").is_running)
    waiting.join()
    assert far_store.local.path(name).read_bytes() == LARGE
    if is_awaited:
        assert len(past_the_cache) <= at_once  # those were under way before anybody waited
    else:
        assert len(past_the_cache) == name.chunk_count


def test_who_waits_goes_on_when_the_little_that_is_left_takes_a_moment(
    tier: ScriptedTier, far_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_HEAD_START_S", 1e-4)  # less than a chunk takes
    little = put(tier, noise(100, 2))
    large, may_come = put(tier, LARGE), threading.Event()

    def held(key: str, number: int, data: bytes) -> bytes:
        assert key != little.key or may_come.wait(WAIT_S)
        return data

    tier.interfere = held
    prefetcher = Prefetcher(far_store)
    prefetcher.start_gather("job", Trace((whole(large), whole(little))), 0.0)
    progress = prefetcher.gathered("job", WAIT_S)
    assert (progress.left_bytes, progress.is_running) == (little.size, True)
    assert far_store.local.has(large)
    may_come.set()
    wait_until(lambda: not prefetcher.progress("job").is_running)
    assert far_store.local.has(little)


def test_more_is_under_way_from_farther_away() -> None:
    near, zone, bucket = (at_once_bytes(seconds) for seconds in (0.0, 0.02, 0.2))
    assert near < zone < bucket <= at_once_bytes(10.0) == at_once_bytes(None)
    assert at_once_bytes(None) == AT_ONCE * CHUNK_BYTES


def test_the_distance_is_that_of_the_farthest_tier_and_known_when_all_are(
    far: Origin, tmp_path: Path
) -> None:
    folder = ObjectFolder(tmp_path / "near")
    tiers = [HttpTier(far.url, "default") for _ in range(2)]
    store = Store(folder.tenant("default"), tiers)
    assert store.transfer.distance_s is None
    for tier, latency_s in zip(tiers, (0.3, 0.0), strict=True):
        assert store.transfer.distance_s is None
        far.behave(Behaviour(latency_s=latency_s))
        assert not tier.has("sha256/none", time.monotonic() + WAIT_S)
    distance_s = store.transfer.distance_s
    assert distance_s is not None
    assert distance_s >= 0.3
    store.close()
    folder.close()
