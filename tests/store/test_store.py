import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nagara.base.linux import MS_NODEV, mount, unmount
from nagara.store.budget import ByteBudget
from nagara.store.errors import AbsentError, CorruptError, UnavailableError
from nagara.store.flights import claimed
from nagara.store.http_tier import HttpTier
from nagara.store.local import ObjectFolder
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.store.reader import AssemblyReader, FileReader
from nagara.store.store import Store
from nagara.testing.objects import chunk_list, noise, put_object
from nagara.testing.origin import Behaviour, Origin
from nagara.testing.tiers import ScriptedTier

StoreMaker = Callable[..., Store]
LARGE = (64 << 20) + 12345


def tier_with(*contents: bytes, **options: object) -> tuple[ScriptedTier, list[ObjectName]]:
    tier = ScriptedTier(**options)  # type: ignore[arg-type]
    names = []
    for content in contents:
        name = name_bytes(content)
        tier.content[name.key] = content
        if name.is_chunked:
            tier.content[name.list_key] = chunk_list(content).to_bytes()
        names.append(name)
    return tier, names


def test_an_object_is_fetched_once_and_then_local(make_store: StoreMaker) -> None:
    tier, [name] = tier_with(b"content")
    store = make_store(tier)
    assert [store.read(name) for _ in range(3)] == [b"content"] * 3
    assert len(tier.reads) == 1
    assert isinstance(store.open(name), FileReader)


def test_an_object_whose_fetch_hangs_in_another_process_is_fetched_twice(
    make_store: StoreMaker,
) -> None:
    tier, [name] = tier_with(b"content")
    store = make_store(tier)
    with claimed(store.local.partial / str(name), time.monotonic()):
        assert store.read(name, time.monotonic() + 0.5) == b"content"
    assert isinstance(store.open(name), FileReader)


def test_eighty_staggered_readers_of_one_cold_object_share_one_fetch(
    make_store: StoreMaker,
) -> None:
    content = noise(3_000_000)
    tier, [name] = tier_with(content, interfere=lambda key, number, data: time.sleep(0.2) or data)
    store = make_store(tier)

    def read(index: int) -> bytes:
        time.sleep(index * 0.003)
        return store.read(name)

    with ThreadPoolExecutor(80) as pool:
        assert all(data == content for data in pool.map(read, range(80)))
    assert len(tier.reads) == 1


def test_processes_share_one_fetch_too(make_store: StoreMaker, origin: Origin) -> None:
    name = put_object(origin.root, noise(500_000))
    store = make_store()
    origin.behave(Behaviour(latency_s=0.5))
    script = (
        "import sys\nfrom pathlib import Path\nfrom nagara.store.http_tier import HttpTier\n"
        "from nagara.store.local import ObjectFolder\nfrom nagara.store.names import parse_name\n"
        "from nagara.store.store import Store\nfolder = ObjectFolder(Path(sys.argv[1]))\n"
        "store = Store(folder.tenant('default'), [HttpTier(sys.argv[2], 'default')])\n"
        "store.ensure(parse_name(sys.argv[3]))\nstore.close()\nfolder.close()\n"
    )
    folder = store.local.folder.path
    command = [sys.executable, "-c", script, str(folder), origin.url, str(name)]
    readers = [subprocess.Popen(command) for _ in range(4)]
    assert [reader.wait(60) for reader in readers] == [0] * 4
    assert origin.counters()["requests"] == {f"default/{name.key}": 1}
    assert list(store.local.partial.iterdir()) == []
    assert store.read(name) == noise(500_000)


def test_slow_objects_do_not_hold_up_a_fast_one(make_store: StoreMaker) -> None:
    release = threading.Event()

    def slow(key: str, number: int, data: bytes) -> bytes:
        if key != fast.key:
            assert release.wait(20)
        return data

    tier, [one, two, fast] = tier_with(b"slow 1", b"slow 2", b"fast", interfere=slow)
    store = make_store(tier)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.read, name) for name in (one, two)]
        assert store.read(fast) == b"fast"
        assert not any(future.done() for future in waiting)
        release.set()
        assert [future.result(20) for future in waiting] == [b"slow 1", b"slow 2"]


def test_the_nearest_tier_that_has_it_is_asked_and_the_nearer_ones_keep_it(
    make_store: StoreMaker,
) -> None:
    near, far = ScriptedTier("near"), ScriptedTier("far")
    deaf = ScriptedTier("deaf", can_write=False)
    name = name_bytes(b"content")
    far.content[name.key] = b"content"
    store = make_store(near, deaf, far)
    assert store.read(name) == b"content"
    store.transfer.settle()
    assert near.content == {name.key: b"content"}
    assert deaf.content == {}
    other = make_store(near, deaf, far, folder="other machine")
    assert other.read(name) == b"content"
    assert len(far.reads) == 1
    reports = {report.tier: report for report in store.reports()}
    assert (reports["near"].misses, reports["far"].hits) == (1, 1)
    assert reports["far"].read_bytes == 7


@pytest.mark.parametrize("size", [1000, 5_000_000, LARGE])
def test_a_wrong_first_answer_is_not_kept_and_the_second_one_serves(
    make_store: StoreMaker, size: int
) -> None:
    content = noise(size)

    tier, [name] = tier_with(
        content, interfere=lambda key, n, data: b"!" + data[1:] if n == 1 else data
    )
    store = make_store(tier)
    assert store.read(name) == content


@pytest.mark.parametrize("size", [1000, 5_000_000, LARGE])
def test_bytes_that_are_wrong_everywhere_are_an_error_and_never_served(
    make_store: StoreMaker, size: int
) -> None:
    content = noise(size)
    tier, [name] = tier_with(content, interfere=lambda key, n, data: b"!" + data[1:])
    store = make_store(tier)
    with pytest.raises(CorruptError):
        store.read(name)
    assert not store.local.has(name)
    tier.interfere = None
    assert store.read(name) == content  # one bad fetch does not make it unreadable for good


def test_a_corrupted_local_object_is_fetched_again(make_store: StoreMaker) -> None:
    tier, [name] = tier_with(b"content")
    store = make_store(tier)
    store.ensure(name)
    store.local.folder.syncer.flush()
    path = store.local.path(name)
    path.chmod(0o644)
    path.write_bytes(b"CONTENT")
    assert store.read(name) == b"content"
    assert len(tier.reads) == 2


def test_a_corrupted_object_without_an_origin_is_absent_not_wrong(make_store: StoreMaker) -> None:
    store = make_store()
    name = store.put_bytes(b"content")
    path = store.local.path(name)
    path.chmod(0o644)
    path.write_bytes(b"CONTENT")
    with pytest.raises(AbsentError):
        store.read(name)


def test_an_unreachable_origin_is_not_taken_for_an_empty_one(
    make_store: StoreMaker,
) -> None:
    def down(key: str, number: int, data: bytes) -> bytes:
        raise UnavailableError("down")

    tier, [here, away] = tier_with(b"here", b"away")
    empty = ScriptedTier("empty")
    store = make_store(tier, empty)
    assert store.read(here) == b"here"
    tier.interfere = down
    assert store.read(here) == b"here"  # warm: the origin is not needed
    with pytest.raises(UnavailableError):
        store.read(away)
    tier.interfere = None
    assert store.read(away) == b"away"


def test_a_large_object_is_read_in_the_middle_without_the_rest(make_store: StoreMaker) -> None:
    content = noise(LARGE)
    tier, [name] = tier_with(content)
    store = make_store(tier)
    reader = store.open(name)
    assert isinstance(reader, AssemblyReader)
    start = 5 * CHUNK_BYTES - 10
    assert not reader.is_here(start, 20)
    buffer = memoryview(bytearray(20))
    reader.read_into(buffer, start, time.monotonic() + 20)
    assert bytes(buffer) == content[start : start + 20]
    assert reader.is_here(start, 20)
    assert [key for key, _, length in tier.reads if length == CHUNK_BYTES] == [name.key] * 2
    assert not store.local.has(name)
    store.ensure(name)
    assert store.local.path(name).read_bytes() == content
    assert len(tier.reads) == 1 + name.chunk_count  # the list, and each chunk once
    assert list(store.local.partial.iterdir()) == []
    assert isinstance(store.open(name), FileReader)


def test_chunks_of_an_interrupted_assembly_are_used_after_they_were_checked(
    make_store: StoreMaker,
) -> None:
    content = noise(LARGE)
    tier, [name] = tier_with(content)
    first = make_store(tier)
    reader = first.open(name)
    buffer = memoryview(bytearray(3 * CHUNK_BYTES))
    reader.read_into(buffer, 0, time.monotonic() + 20)
    partial = first.local.partial / str(name)
    with partial.open("r+b") as file:  # torn by a crash
        file.seek(CHUNK_BYTES + 7)
        file.write(b"torn")
    tier.reads.clear()
    folder = ObjectFolder(first.local.folder.path)
    second = Store(folder.tenant("default"), [tier])
    second.ensure(name)
    assert second.local.path(name).read_bytes() == content
    fetched = {start // CHUNK_BYTES for key, start, _ in tier.reads if key == name.key}
    assert fetched == {1, *range(3, name.chunk_count)}
    second.close()
    folder.close()


def test_a_large_object_that_was_evicted_after_it_was_put_together_is_fetched_again(
    make_store: StoreMaker,
) -> None:
    content = noise(LARGE)
    tier, [name] = tier_with(content)
    store = make_store(tier)
    reader = store.open(name)
    for start in range(0, name.size, CHUNK_BYTES):
        reader.need(start, 1, time.monotonic() + 20)
    assert store.local.has(name)
    store.local.discard(name)
    buffer = memoryview(bytearray(10))
    reader.read_into(buffer, 5, time.monotonic() + 20)  # who has it open goes on
    assert bytes(buffer) == content[5:15]
    another = store.open(name)
    for start in range(0, name.size, CHUNK_BYTES):
        another.need(start, 1, time.monotonic() + 20)
    assert store.local.path(name).read_bytes() == content


def test_holes_of_a_large_object_are_neither_moved_nor_stored(make_store: StoreMaker) -> None:
    content = bytes(40 << 20) + noise(1000) + bytes(40 << 20)
    tier, [name] = tier_with(content)
    store = make_store(tier)
    store.ensure(name)
    assert len([1 for key, _, _ in tier.reads if key == name.key]) == 1
    assert store.local.path(name).stat().st_blocks * 512 <= CHUNK_BYTES + 65536
    assert store.local.path(name).read_bytes() == content


def test_with_a_full_budget_bytes_pass_the_disk_by(make_store: StoreMaker) -> None:
    small, large = noise(300_000), noise(LARGE, 1)
    tier, [one, two] = tier_with(small, large)
    store = make_store(tier, limit=100_000)
    assert store.read(one) == small
    assert store.read(two) == large
    assert store.local.folder.ledger.total_bytes() == 0
    assert list(store.local.objects.iterdir()) == list(store.local.partial.iterdir()) == []


@pytest.mark.root
def test_with_a_full_disk_bytes_pass_it_by(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("tmpfs", disk, "tmpfs", MS_NODEV, "size=8m")
    try:
        contents = [noise(3_000_000, seed) for seed in range(6)]
        tier, names = tier_with(*contents)
        folder = ObjectFolder(disk / "store")
        store = Store(folder.tenant("default"), [tier])
        for _ in range(2):
            assert [store.read(name) for name in names] == contents
        large = noise(LARGE, 9)
        extra, [name] = tier_with(large)
        tier.content.update(extra.content)
        assert store.read(name) == large
        store.close()
        folder.close()
    finally:
        unmount(disk)


def test_a_killed_fetch_is_begun_again_by_the_next_one(
    make_store: StoreMaker, origin: Origin
) -> None:
    name = put_object(origin.root, noise(5_000_000))
    store = make_store()
    origin.behave(Behaviour(stall_after=1_000_000, times=2))
    script = (
        "import sys\nfrom pathlib import Path\nfrom nagara.store.http_tier import HttpTier\n"
        "from nagara.store.local import ObjectFolder\nfrom nagara.store.names import parse_name\n"
        "from nagara.store.store import Store\nfolder = ObjectFolder(Path(sys.argv[1]))\n"
        "store = Store(folder.tenant('default'), [HttpTier(sys.argv[2], 'default')])\n"
        "print('fetching', flush=True)\nstore.ensure(parse_name(sys.argv[3]))\n"
    )
    folder = store.local.folder.path
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(folder), origin.url, str(name)],
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    partial = store.local.partial / str(name)
    while not (partial.exists() and origin.counters()["bytes"] >= 5_000_000):
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    assert not store.local.has(name)
    origin.behave(Behaviour())
    second = make_store(HttpTier(origin.url, "default"))
    assert second.read(name) == noise(5_000_000)


def test_one_byte_budget_bounds_all_transfers(make_store: StoreMaker) -> None:
    contents = [noise(6_000_000, seed) for seed in range(12)]
    tier, names = tier_with(*contents, interfere=lambda key, n, data: time.sleep(0.01) or data)
    folder = make_store().local.folder
    budget = ByteBudget(16 << 20)
    store = Store(folder.tenant("other"), [tier], budget=budget)
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(store.read, names)) == contents
    assert CHUNK_BYTES < budget.most_bytes <= 16 << 20
    store.close()


def test_without_memory_a_transfer_ends_at_its_deadline() -> None:
    budget = ByteBudget(100)
    with (
        budget.held(100, time.monotonic() + 1),
        pytest.raises(UnavailableError),
        budget.held(1, time.monotonic() + 0.05),
    ):
        pass
    with budget.held(1000, time.monotonic() + 1):  # more than the limit counts as the limit
        assert budget.most_bytes == 100


def test_put_objects_are_named_and_kept(make_store: StoreMaker) -> None:
    store = make_store()
    for content in (b"", b"x", noise(LARGE)):
        name = store.put_bytes(content)
        assert name == name_bytes(content)
        assert store.read(name) == content
        assert store.put_bytes(content) == name


def test_a_sparse_file_of_64_gib_is_named_and_kept_without_reading_its_holes(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    with store.local.temporary() as path:
        with path.open("r+b") as file:
            file.truncate(64 << 30)
            file.seek(40 << 30)
            file.write(b"island")
        name = store.put_temporary(path)
    assert name.size == 64 << 30
    assert store.local.path(name).stat().st_blocks * 512 < 1 << 20
    descriptor = store.local.open(name)
    assert descriptor is not None
    assert os.pread(descriptor, 6, 40 << 30) == b"island"
    os.close(descriptor)
