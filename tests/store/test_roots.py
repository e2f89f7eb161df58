import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nagara.base.errors import UsageError
from nagara.store.collecting import BrokenRootError, collect_local, collect_tier
from nagara.store.errors import AbsentError, CorruptError
from nagara.store.ledger import Pin
from nagara.store.moving import pull, push
from nagara.store.names import name_bytes
from nagara.store.roots import (
    Root,
    fetch_root,
    list_roots,
    parse_root,
    put_list,
    read_root,
    remove_root,
    root_key,
    write_root,
)
from nagara.store.store import Store
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise

StoreMaker = Callable[..., Store]


def add_root(store: Store, name: str, *contents: bytes) -> Root:
    names = [store.put_bytes(content) for content in contents]
    root = Root("images", name, (put_list(store, names),), {"note": "a test"})
    write_root(store.local, root)
    return root


def test_a_root_is_read_back_and_its_name_may_be_odd(make_store: StoreMaker) -> None:
    store = make_store()
    for name in ("plain", "team/app:1.2", "ä % ..", "~x"):
        root = add_root(store, name, b"x")
        assert read_root(store.local, "images", name) == root
    assert {root.name for root in list_roots(store.local)} == {
        "plain",
        "team/app:1.2",
        "ä % ..",
        "~x",
    }
    remove_root(store.local, "images", "plain")
    with pytest.raises(AbsentError):
        read_root(store.local, "images", "plain")


@pytest.mark.parametrize(("kind", "name"), [("images", ""), ("images", ".."), ("others", "x")])
def test_a_root_needs_a_kind_and_a_name(kind: str, name: str) -> None:
    with pytest.raises(UsageError):
        root_key(kind, name)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2, "name": "x", "lists": []}',
        b'{"version": 1, "name": "y", "lists": []}',
        b'{"version": 1, "name": "x", "lists": ["z"]}',
    ],
)
def test_other_documents_are_no_roots(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_root("images", "x", raw)


def test_collection_keeps_what_roots_and_pins_name_and_what_is_young(
    make_store: StoreMaker,
) -> None:
    store = make_store()
    shared = b"shared"
    one = add_root(store, "one", shared, b"only one")
    add_root(store, "two", shared, b"only two")
    pinned = store.put_bytes(b"pinned")
    listing = put_list(store, [pinned])
    store.local.folder.ledger.pin(Pin("mount", "default", str(listing)))
    loose = store.put_bytes(b"loose")
    assert collect_local(store.local, grace_s=3600).removed == 0
    remove_root(store.local, "images", "one")
    would = collect_local(store.local, grace_s=-1, is_dry=True)
    done = collect_local(store.local, grace_s=-1)
    assert (would.removed, would.kept) == (done.removed, done.kept)
    gone = {name_bytes(b"only one"), loose, one.lists[0]}
    assert done.removed == len(gone)
    assert not any(store.local.has(name) for name in gone)
    kept = (name_bytes(shared), name_bytes(b"only two"), pinned, listing)
    assert all(store.local.has(name) for name in kept)


def test_with_an_unreadable_list_nothing_is_collected(make_store: StoreMaker) -> None:
    store = make_store()
    root = add_root(store, "one", b"content")
    store.put_bytes(b"loose")
    store.local.discard(root.lists[0])
    with pytest.raises(BrokenRootError):
        collect_local(store.local, grace_s=-1)
    assert store.local.has(name_bytes(b"loose"))


def test_pushing_and_pulling_move_only_what_is_missing(
    make_store: StoreMaker, tmp_path: Path
) -> None:
    far = FolderTier(tmp_path / "far", "default")
    (tmp_path / "far").mkdir()
    store = make_store()
    large = noise((64 << 20) + 1)
    root = add_root(store, "one", b"a", b"b", large)
    moved = push(store, far, root)
    assert (moved.objects, moved.moved_objects) == (4, 4)
    again = push(store, far, root)
    assert (again.objects, again.moved_objects, again.moved_bytes) == (4, 0, 0)
    other = make_store(far, folder="other")
    assert pull(other, fetch_root(other, "images", "one")).moved_objects == 3  # the list came first
    assert other.read(name_bytes(large)) == large
    assert read_root(other.local, "images", "one") == root


def test_a_tier_is_collected_by_its_own_roots(make_store: StoreMaker, tmp_path: Path) -> None:
    far = FolderTier(tmp_path / "far", "default")
    (tmp_path / "far").mkdir()
    store = make_store()
    push(store, far, add_root(store, "one", b"a", b"shared"))
    push(store, far, add_root(store, "two", b"b", b"shared"))
    soon = time.monotonic() + 20
    far.delete(root_key("images", "two"), soon)
    assert collect_tier(far, 3600, soon).removed == 0
    assert collect_tier(far, -1, soon).removed == 2  # b and its list
    assert far.has(name_bytes(b"shared").key, soon)
    assert not far.has(name_bytes(b"b").key, soon)
    listing = fetch_root(make_store(far, folder="x"), "images", "one").lists[0]
    (tmp_path / "far/default" / listing.key).unlink()
    far.write(name_bytes(b"loose").key, b"loose", soon)
    with pytest.raises(BrokenRootError):
        collect_tier(far, -1, soon)
    assert far.has(name_bytes(b"loose").key, soon)
