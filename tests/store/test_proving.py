from collections.abc import Callable
from pathlib import Path

import pytest

from nagara.store.errors import AbsentError
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.store.reader import FileReader
from nagara.store.store import Store
from nagara.testing.objects import chunk_list, noise
from nagara.testing.tiers import ScriptedTier

StoreMaker = Callable[..., Store]
CONTENT = noise((64 << 20) + 4321)
NAME = name_bytes(CONTENT)


@pytest.fixture
def tier() -> ScriptedTier:
    made = ScriptedTier()
    made.content = {NAME.key: CONTENT, NAME.list_key: chunk_list(CONTENT).to_bytes()}
    return made


def forget_proof(store: Store, name: ObjectName, flipped: int | None = None) -> None:
    """What a write from outside does: another change time, and perhaps another byte."""
    path = store.local.path(name)
    store.local.folder.syncer.flush()
    path.chmod(0o644)
    if flipped is not None:
        with path.open("r+b") as file:
            file.seek(flipped)
            file.write(bytes([CONTENT[flipped] ^ 1]))


def read(store: Store, start: int, length: int) -> bytes:
    found = bytearray(length)
    store.open(NAME).read_into(memoryview(found), start, store.deadline(None))
    return bytes(found)


def is_recorded(store: Store) -> bool:
    store.local.folder.syncer.flush()
    state = store.local.path(NAME).stat()
    proof = store.local.folder.ledger.proof("default", str(NAME))
    return proof is not None and proof.ctime_ns == state.st_ctime_ns


def test_a_read_of_an_unproven_large_object_checks_its_own_chunks_only(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    forget_proof(store, NAME)
    reader = store.open(NAME)
    assert not reader.is_here(0, 1)
    found = bytearray(10)
    reader.read_into(memoryview(found), 2 * CHUNK_BYTES - 5, store.deadline(None))
    assert found == CONTENT[2 * CHUNK_BYTES - 5 : 2 * CHUNK_BYTES + 5]
    here = [reader.is_here(index * CHUNK_BYTES, 1) for index in range(NAME.chunk_count)]
    assert here == [index in (1, 2) for index in range(NAME.chunk_count)]
    assert not is_recorded(store)


def test_an_object_whose_chunks_were_all_read_is_proven(make_store: StoreMaker) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    forget_proof(store, NAME)
    assert read(store, 0, NAME.size) == CONTENT
    assert is_recorded(store)
    assert isinstance(store.open(NAME), FileReader)


def test_an_object_that_changed_while_it_was_checked_is_not_proven(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    forget_proof(store, NAME)
    read(store, 0, NAME.size - CHUNK_BYTES)
    store.local.path(NAME).chmod(0o600)
    read(store, 0, NAME.size)
    assert not is_recorded(store)


def test_only_the_wrong_chunk_of_a_large_object_is_fetched_again(
    make_store: StoreMaker, tier: ScriptedTier
) -> None:
    store = make_store(tier)
    store.put_bytes(CONTENT)
    forget_proof(store, NAME, flipped=5 * CHUNK_BYTES + 7)
    assert read(store, 0, NAME.size) == CONTENT
    assert [start for key, start, _ in tier.reads if key == NAME.key] == [5 * CHUNK_BYTES]
    store.ensure(NAME)
    assert store.local.path(NAME).read_bytes() == CONTENT


def test_a_wrong_chunk_that_nobody_has_is_an_error_and_the_others_are_served(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    forget_proof(store, NAME, flipped=5 * CHUNK_BYTES)
    opened_before = store.open(NAME)
    with pytest.raises(AbsentError):
        read(store, 5 * CHUNK_BYTES + 10, 10)
    for start in (0, 5 * CHUNK_BYTES - 10, 6 * CHUNK_BYTES):
        assert read(store, start, 10) == CONTENT[start : start + 10]
    found = bytearray(10)
    opened_before.read_into(memoryview(found), 0, store.deadline(None))
    assert found == CONTENT[:10]


def test_without_its_chunk_list_a_large_object_is_proven_as_a_whole(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    store.local.list_path(NAME).unlink()
    forget_proof(store, NAME)
    assert isinstance(store.open(NAME), FileReader)
    assert is_recorded(store)


def test_proofs_close_their_files(make_store: StoreMaker) -> None:
    store = make_store()
    store.put_bytes(CONTENT)
    store.local.folder.syncer.flush()  # it has files open for a moment
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        forget_proof(store, NAME)
        assert read(store, 0, 10) == CONTENT[:10]
        assert read(store, 0, NAME.size) == CONTENT
    store.local.folder.syncer.flush()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
