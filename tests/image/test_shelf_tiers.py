"""A shelf and the tiers behind it: what is pushed is found, whole, by who never had it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nagara.image import shelf_tiers
from nagara.image.shelf import Shelf, Shelved
from nagara.image.shelf_tiers import (
    adopt,
    far_entries,
    pull_shelved,
    push_shelved,
    tier_entries,
    withdraw,
)
from nagara.store.collecting import collect_local, collect_tier
from nagara.store.errors import AbsentError, CorruptError, StoreError, UnavailableError
from nagara.store.local import ObjectFolder
from nagara.store.store import Store
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise

Machine = Callable[..., Shelf]
DEADLINE_S = 1e12


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Shelves of machines of their own, over the tiers they are given."""
    closing: list[Any] = []

    def make(name: str, *tiers: Any) -> Shelf:
        folder = ObjectFolder(tmp_path / name)
        store = Store(folder.tenant("default"), tiers, time_limit_s=5.0)
        closing.extend((folder, store))
        return Shelf(store, "snapshots")

    yield make
    for each in reversed(closing):
        each.close()


@pytest.fixture(autouse=True)
def short_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_tiers, "_MOMENT_S", 0.0)


@pytest.fixture
def far(tmp_path: Path) -> FolderTier:
    (tmp_path / "far").mkdir()
    return FolderTier(tmp_path / "far", "default", "far")


class DownTier(FolderTier):
    """One that cannot be asked."""

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        raise UnavailableError("is down", where=self.name)


def put(shelf: Shelf, name: str, seed: int, size: int = 70_000) -> Shelved:
    folder = shelf.local.root / f"made-{name}"
    (folder / "memory").mkdir(parents=True)
    (folder / "memory/large").write_bytes(noise(size, seed))
    (folder / "memory/small").write_bytes(b"small")
    return shelf.put(folder, shelf.plan(folder), name, {"seed": seed}, lambda _: None).shelved


def test_what_was_pushed_is_found_adopted_and_read_by_another(
    machine: Machine, far: FolderTier
) -> None:
    one, other = machine("one"), machine("other", far)
    shelved = put(one, "app.1.a", 1)
    push_shelved(one, far, shelved, "app", {"fits": "all"})
    assert far_entries(other, "app", DEADLINE_S) == {"app.1.a": {"fits": "all"}}
    assert far_entries(other, "another", DEADLINE_S) == {}
    found = adopt(other, "app.1.a", DEADLINE_S)
    assert found == shelved == other.read("app.1.a")
    faults = other.faults(found)
    assert [fault.is_wrong for fault in faults] == [False]  # its index comes when it is mounted
    name = one.object_at(shelved.image, "memory/large")
    assert other.is_elsewhere(name)
    assert other.store.read(name) == noise(70_000, 1)


def test_it_is_collected_nowhere_while_it_is_known_there(machine: Machine, far: FolderTier) -> None:
    one, other = machine("one"), machine("other", far)
    push_shelved(one, far, put(one, "app.1.a", 1), "app", {})
    pull_shelved(other, "app.1.a")
    assert collect_local(other.local, 0.0).removed == 0
    assert collect_tier(far, -1.0, DEADLINE_S).removed == 0
    withdraw(one, far, "app.1.a", "app")
    assert far_entries(other, "app", DEADLINE_S) == {}
    with pytest.raises(AbsentError):
        far.read_all("roots/snapshots/app.1.a", 1 << 20, DEADLINE_S)
    assert collect_tier(far, -1.0, DEADLINE_S).removed == 3
    assert other.faults(other.read("app.1.a")) == []


def test_of_a_push_that_breaks_off_nothing_is_found(
    machine: Machine, far: FolderTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machine("one"), machine("other", far)
    shelved = put(one, "app.1.a", 1)
    write, count = far.write, 0

    def broken(key: str, source: Any, deadline_s: float) -> None:
        nonlocal count
        if count == broken_at:
            raise UnavailableError("broke off")
        count += 1
        write(key, source, deadline_s)

    monkeypatch.setattr(far, "write", broken)
    for moment in range(5):  # three objects, the root, the document
        broken_at = moment
        with pytest.raises(UnavailableError, match="broke off"):
            push_shelved(one, far, shelved, "app", {})
        assert far_entries(other, "app", DEADLINE_S) == {}
    broken_at = -1
    push_shelved(one, far, shelved, "app", {})
    assert list(far_entries(other, "app", DEADLINE_S)) == ["app.1.a"]


def test_what_another_takes_away_unknowingly_is_said_again(
    machine: Machine, far: FolderTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has read the document before, and writes it after."""
    one, other = machine("one"), machine("other", far)
    push_shelved(one, far, put(one, "app.1.a", 1), "app", {})
    before = far.read_all("roots/snapshots/app~", 1 << 20, DEADLINE_S)
    write, overwritten = far.write, 0

    def and_the_other(key: str, source: Any, deadline_s: float) -> None:
        nonlocal overwritten
        write(key, source, deadline_s)
        if key.endswith("~") and overwritten < 3:
            overwritten += 1
            write(key, before, deadline_s)

    monkeypatch.setattr(far, "write", and_the_other)
    push_shelved(one, far, put(one, "app.1.b", 2), "app", {})
    assert overwritten == 3
    assert far_entries(other, "app", DEADLINE_S).keys() == {"app.1.a", "app.1.b"}


def test_a_tier_that_is_down_hides_nothing_of_the_others(
    machine: Machine, far: FolderTier, tmp_path: Path
) -> None:
    one = machine("one")
    push_shelved(one, far, put(one, "app.1.a", 1), "app", {})
    down = DownTier(tmp_path / "far", "default", "down")
    assert list(far_entries(machine("two", down, far), "app", DEADLINE_S)) == ["app.1.a"]
    with pytest.raises(UnavailableError, match="is down"):
        far_entries(machine("three", down), "app", DEADLINE_S)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1, "name": "app~", "lists": []}']
    + [
        json.dumps({"version": 1, "name": "app~", "lists": [], "entries": entries})
        for entries in ([], {"app.1.a": 5}, None)
    ],
)
def test_a_malformed_document_is_an_error_and_nothing_else(
    machine: Machine, far: FolderTier, text: str
) -> None:
    far.write("roots/snapshots/app~", text.encode(), DEADLINE_S)
    with pytest.raises(CorruptError):
        tier_entries(machine("one"), far, "app", DEADLINE_S)


def test_what_is_announced_and_not_there_is_not_adopted(machine: Machine, far: FolderTier) -> None:
    one, other = machine("one"), machine("other", far)
    push_shelved(one, far, put(one, "app.1.a", 1), "app", {})
    far.delete("roots/snapshots/app.1.a", DEADLINE_S)
    with pytest.raises(StoreError):
        adopt(other, "app.1.a", DEADLINE_S)
    assert other.all() == []
