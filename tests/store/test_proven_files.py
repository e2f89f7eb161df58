from collections.abc import Callable

from nagara.store.names import ObjectName, large_names, name_bytes, pack_names, unpack_names
from nagara.store.roots import put_list
from nagara.store.store import Store
from nagara.testing.objects import noise

StoreMaker = Callable[..., Store]
LARGE = noise((64 << 20) + 4321)
SMALL = noise(5000, 1)


def stored(store: Store) -> tuple[ObjectName, ObjectName]:
    """A large and a small object and a list of both: (the large one, the list)."""
    large = store.put_bytes(LARGE)
    listing = put_list(store, [large, store.put_bytes(SMALL)])
    store.local.folder.syncer.flush()
    return large, listing


def test_what_is_large_is_seen_in_a_list_at_once() -> None:
    names = [name_bytes(noise(100, number)) for number in range(50)]
    assert large_names(pack_names(names)) == []
    large = [ObjectName(bytes([number] * 32), (64 << 20) + number + 1) for number in range(3)]
    raw = pack_names([*names, *large])
    assert large_names(raw) == large
    assert large == [name for name in unpack_names(raw) if name.is_chunked]
    assert large_names(pack_names(large)[:-1]) == large[:2]  # what is cut is no name
    assert large_names(b"") == []


def test_a_proven_large_object_has_a_second_name(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    assert store.local.offer_large(listing)
    second = store.local.proven.folder / str(large)
    state = second.stat()
    assert (state.st_ino, state.st_nlink) == (store.local.path(large).stat().st_ino, 2)
    assert store.local.offer_large(listing)
    assert second.stat().st_ctime_ns == state.st_ctime_ns
    assert store.local.open_unproven(large) is None  # it is as proven as before


def test_an_object_that_was_written_to_loses_its_second_name(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    assert store.local.offer_large(listing)
    path = store.local.path(large)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"?")
    assert not store.local.offer_large(listing)
    assert not (store.local.proven.folder / str(large)).exists()
    assert path.exists()  # whoever reads it finds the wrong chunk


def test_an_object_that_nobody_has_proven_gets_no_second_name(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    store.local.path(large).chmod(0o400)  # another change time
    assert not store.local.offer_large(listing)
    assert store.local.verify(large)
    store.local.folder.syncer.flush()
    assert store.local.offer_large(listing)


def test_an_object_that_was_put_in_anothers_place_is_not_offered(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    assert store.local.offer_large(listing)
    path = store.local.path(large)
    path.unlink()
    path.write_bytes(b"?" + LARGE[1:])
    assert not store.local.offer_large(listing)
    assert not (store.local.proven.folder / str(large)).exists()


def test_an_object_that_goes_takes_its_second_name_along(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    assert store.local.offer_large(listing)
    store.local.discard(large)
    assert not (store.local.proven.folder / str(large)).exists()
    assert not store.local.offer_large(listing)


def test_an_object_with_a_wrong_chunk_is_offered_no_more(make_store: StoreMaker) -> None:
    store = make_store()
    large, listing = stored(store)
    assert store.local.offer_large(listing)
    store.local.take_apart(large)
    assert not (store.local.proven.folder / str(large)).exists()
