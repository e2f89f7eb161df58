"""Snapshots in the store: whole or not there, verified, set aside."""

import errno
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from nagara.image.images import load_tree
from nagara.image.shelf import Shelf
from nagara.image.tree import walk
from nagara.snapshot.catalog import (
    KIND,
    Catalog,
    FileMark,
    SnapshotRecord,
    as_shelved,
    root_name,
    snapshot_from,
)
from nagara.snapshot.errors import BadSnapshotError, RestoreError
from nagara.snapshot.variant import Variant
from nagara.store.collecting import collect_local
from nagara.store.ledger import Pin
from nagara.store.local import ObjectFolder
from nagara.store.scrubbing import Scrub
from nagara.store.store import Store

KEY = "0123456789abcdef"
VARIANT = Variant(frozenset({"avx2", "sse2"}), 3632, 64)
FILES = ["memory/pages-1.img", "memory/core.img", "layer.erofs"]


class House:
    """A machine's store and snapshots, which several processes in turn may open."""

    def __init__(self, path):
        self.path = path
        self.folder = ObjectFolder(path / "store")
        self.stores = defaultdict(lambda: None)

    def shelf(self, tenant):
        if self.stores[tenant] is None:
            self.stores[tenant] = Store(self.folder.tenant(tenant))
        return Shelf(self.stores[tenant], KIND)

    def catalog(self):
        return Catalog(self.path / "snapshots", self.shelf, self.folder.tenant_names)

    def close(self):
        for store in self.stores.values():
            store.close()
        self.folder.close()

    def object(self, snapshot, place):
        """The file of the object of one file of a snapshot."""
        shelf = self.shelf(snapshot.tenant)
        return shelf.local.path(shelf.object_at(snapshot.image, place))

    def root(self, snapshot):
        name = root_name(snapshot.app, snapshot.record.key, snapshot.name)
        return self.shelf(snapshot.tenant).local.root / "roots" / KIND / name

    def objects(self):
        """How many objects there are."""
        return sum(self.folder.ledger.count(tenant)[0] for tenant in self.folder.tenant_names())


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture
def catalog(house):
    return house.catalog()


def record_of(key=KEY, variant=VARIANT, host_files=()):
    return SnapshotRecord(
        key=key,
        variant=variant,
        canary_answer='200 "yes"\n',
        host_files=host_files,
        layer_digest="ab" * 32,
        created_at_s=1.5,
        memory_bytes=30_004,
        layer_bytes=4096,
    )


def staged(catalog, same=b""):
    staging = catalog.staging()
    catalog.make_staging(staging)
    for number in range(3):
        content = same if number == 2 and same else os.urandom(10_000)
        (staging / f"memory/pages-{number}.img").write_bytes(content)
    (staging / "memory/core.img").write_bytes(os.urandom(3000))
    (staging / "memory/small.img").write_bytes(b"small")
    (staging / "layer.erofs").write_bytes(os.urandom(4096))
    return staging


def publish(catalog, *, app="app", tenant="default", same=b"", **record):
    put = catalog.publish(staged(catalog, same), tenant, app, record_of(**record))
    return snapshot_from(tenant, put.shelved)


def check(catalog, snapshot):
    """As before a restore: what is checked is held."""
    local = catalog.shelf(snapshot.tenant).local
    local.folder.ledger.pin(Pin("test", snapshot.tenant, str(snapshot.image.list)))
    catalog.check(snapshot)


def test_what_is_published_is_found_with_the_same_record(catalog):
    snapshot = publish(catalog)
    (found,) = catalog.all_of("default", "app", KEY)
    assert found == snapshot
    check(catalog, found)


def test_its_image_has_all_that_was_saved_and_nothing_was_copied(catalog, house):
    staging = staged(catalog)
    before = {str(path.relative_to(staging)): path.stat().st_ino for path in everything(staging)}
    contents = {place: (staging / place).read_bytes() for place in before}
    put = catalog.publish(staging, "default", "app", record_of())
    tree = load_tree(house.shelf("default").store, put.shelved.image)
    found = {path.decode(): node for path, node in walk(tree) if not node.is_folder}
    assert found.keys() == before.keys()
    snapshot = snapshot_from("default", put.shelved)
    for place, node in found.items():
        if node.content is None:
            assert node.inline == contents[place]
            continue
        path = house.object(snapshot, place)
        assert path.read_bytes() == contents[place]
        assert path.stat().st_ino == before[place]


def test_where_the_store_is_on_another_disk_it_is_copied_and_checked(catalog, house, monkeypatch):
    local = type(house.shelf("default").local)
    adopt = local.adopt

    def adopt_of_one_disk(self, temporary, *arguments):
        if not temporary.is_relative_to(self.root):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        adopt(self, temporary, *arguments)

    monkeypatch.setattr(local, "adopt", adopt_of_one_disk)
    staging = staged(catalog)
    contents = {place: (staging / place).read_bytes() for place in FILES}
    snapshot = snapshot_from(
        "default", catalog.publish(staging, "default", "app", record_of()).shelved
    )
    for place, content in contents.items():
        assert house.object(snapshot, place).read_bytes() == content
    check(catalog, snapshot)


def test_what_two_snapshots_have_in_common_is_there_once(catalog, house):
    same = os.urandom(50_000)
    first = catalog.publish(staged(catalog, same), "default", "app", record_of())
    second = catalog.publish(staged(catalog, same), "default", "app", record_of())
    assert first.new_bytes == first.bytes
    assert second.new_bytes == second.bytes - len(same)
    catalog.forget_app("default", "nobody")
    for snapshot in catalog.all_of("default", "app", KEY):
        check(catalog, snapshot)


def test_another_tenant_app_or_key_does_not_find_it(catalog):
    publish(catalog)
    assert catalog.all_of("other", "app", KEY) == []
    assert catalog.all_of("default", "other", KEY) == []
    assert catalog.all_of("default", "app", "f" * 16) == []


def everything(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_only_its_owner_may_read_it(catalog, house, tmp_path):
    snapshot = publish(catalog)
    catalog.count_bad(snapshot, "once")
    assert (house.path / "store").stat().st_mode & 0o777 == 0o700
    notes = tmp_path / "snapshots/default"
    assert {path.stat().st_mode & 0o777 for path in everything(notes)} == {0o600}
    folders = [notes.parent, notes, *(path for path in notes.rglob("*") if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_an_unfinished_capture_is_never_found_and_is_cleared_away(catalog):
    staging = catalog.staging()
    catalog.make_staging(staging)
    (staging / "layer.erofs").write_bytes(b"half")
    assert catalog.all_of("default", "app", KEY) == []
    catalog.clear_staging()
    assert not staging.exists()


class Torn(BaseException):
    """What kills a process between two calls."""


@pytest.mark.parametrize("at", range(8))
def test_of_an_import_that_was_torn_nothing_is_left(catalog, house, monkeypatch, at):
    """As after kill -9: nothing of the process goes on, a new one finds what it left."""
    kept = publish(catalog, same=b"s" * 5000)
    before = house.objects()
    steps = iter(range(100))
    adopt = type(house.shelf("default").local).adopt

    def torn(self, *arguments):
        if next(steps) == at:
            raise Torn
        adopt(self, *arguments)

    monkeypatch.setattr(type(house.shelf("default").local), "adopt", torn)
    monkeypatch.setattr(Shelf, "undo", lambda *_: None)
    staging = staged(catalog, b"s" * 5000)
    try:
        catalog.publish(staging, "default", "app", record_of())
    except Torn:
        assert catalog.all_of("default", "app", KEY) == [kept]
    else:
        assert at >= 6  # it has no more objects
        return
    monkeypatch.undo()
    house.catalog().clear_staging()
    assert not staging.exists()
    assert house.objects() == before
    check(catalog, kept)


def test_a_failed_import_leaves_nothing(catalog, house, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Shelf, "write", full)
    with pytest.raises(OSError, match="No space left"):
        publish(catalog)
    assert (house.objects(), catalog.everything()) == (0, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate", "grow", "remove"])
def test_harm_to_any_object_is_noticed_also_after_a_first_good_check(catalog, house, name, harm):
    snapshot = publish(catalog)
    check(catalog, snapshot)
    path = house.object(snapshot, name)
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "truncate":
        del content[-1]
    elif harm == "grow":
        content += b"\0"
    path.chmod(0o644)
    path.write_bytes(content)
    if harm == "remove":
        path.unlink()
    error = RestoreError if harm == "remove" else BadSnapshotError
    with pytest.raises(error, match=f"{snapshot.name}/{name}"):
        check(catalog, snapshot)
    assert catalog.is_quarantined(snapshot) is (harm != "remove")
    assert house.root(snapshot).exists() is (harm != "remove")


def test_what_other_tiers_have_is_no_fault_and_what_they_lack_is_the_snapshots(catalog, house):
    snapshot = publish(catalog)
    house.object(snapshot, FILES[0]).unlink()
    catalog.check(snapshot, lambda _tenant, _faults: [])
    with pytest.raises(BadSnapshotError, match="incomplete"):
        catalog.check(snapshot, lambda _tenant, faults: list(faults))
    assert catalog.all_of("default", "app", KEY) == [snapshot]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_with_times_put_back_is_noticed_by_a_new_process(house, tmp_path, name):
    snapshot = publish(house.catalog())
    path = house.object(snapshot, name)
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    later = House(tmp_path)
    with pytest.raises(BadSnapshotError, match=f"{snapshot.name}/{name}"):
        check(later.catalog(), snapshot)
    later.close()


def test_a_byte_that_rotted_on_the_disk_is_found_by_a_verification(catalog, house):
    """Rot changes no inode: nothing says so but reading. (The proof is made to fit here.)"""
    snapshot = publish(catalog)
    shelf = house.shelf("default")
    for place in FILES:
        name = shelf.object_at(snapshot.image, place)
        path = shelf.local.path(name)
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x40
        path.chmod(0o644)
        path.write_bytes(content)
        shelf.local._note_proven(name, str(path))
    check(catalog, snapshot)
    faults = shelf.verify(as_shelved(snapshot))
    assert sorted(fault.path for fault in faults) == sorted(FILES)
    assert all(fault.is_wrong for fault in faults)
    with pytest.raises(RestoreError, match="incomplete"):
        check(catalog, snapshot)


def test_a_scrub_finds_a_rotten_byte_of_any_object_and_the_snapshot_goes(catalog, house):
    snapshot = publish(catalog)
    local = house.shelf("default").local
    name = house.shelf("default").object_at(snapshot.image, FILES[0])
    path = local.path(name)
    content = bytearray(path.read_bytes())
    content[77] ^= 2
    path.chmod(0o644)
    path.write_bytes(content)
    local._note_proven(name, str(path))
    check(catalog, snapshot)
    done = Scrub(local, 1e12, lambda _pause_s: False).run_pass()
    assert done.wrong == (str(name),)
    with pytest.raises(RestoreError, match=f"{snapshot.name}/{FILES[0]}"):
        check(catalog, snapshot)
    assert catalog.all_of("default", "app", KEY) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', '{"version": 1}', "\xff"])
def test_damaged_metadata_is_as_if_it_were_not_there(catalog, house, text):
    snapshot = publish(catalog)
    house.root(snapshot).chmod(0o644)
    house.root(snapshot).write_text(text)
    assert catalog.all_of("default", "app", KEY) == []
    assert [(each.name, each.snapshot) for each in catalog.everything()] == [(snapshot.name, None)]


def test_any_single_missing_field_of_the_metadata_is_damage(catalog, house):
    snapshot = publish(catalog)
    path = house.root(snapshot)
    path.chmod(0o644)
    whole = json.loads(path.read_text())
    for part in ("about", "image"):
        for name in whole[part].keys() - {"source_state"}:
            cut = {key: value for key, value in whole[part].items() if key != name}
            path.write_text(json.dumps(whole | {part: cut}))
            assert catalog.all_of("default", "app", KEY) == [], name
    path.write_text(json.dumps(whole))
    assert catalog.all_of("default", "app", KEY) == [snapshot]


def test_a_changed_file_of_the_machine_is_named(catalog, tmp_path):
    library = tmp_path / "lib with a space.so"
    library.write_bytes(b"code")
    state = library.stat()
    mark = FileMark(str(library), state.st_size, state.st_mtime_ns)
    publish(catalog, host_files=(mark,))
    (snapshot,) = catalog.all_of("default", "app", KEY)
    assert snapshot.record.host_files == (mark,)
    assert snapshot.record.changed_host_file() is None
    os.utime(library, ns=(0, state.st_mtime_ns + 1))
    assert snapshot.record.changed_host_file() == str(library)
    library.unlink()
    assert snapshot.record.changed_host_file() == str(library)


def test_the_second_failure_in_a_row_puts_it_in_quarantine_for_good(catalog, house):
    snapshot = publish(catalog)
    assert catalog.count_bad(snapshot, "first\nreason") is False
    assert catalog.all_of("default", "app", KEY) == [snapshot]
    assert catalog.quarantined("default", "app", KEY) == 0
    assert catalog.count_bad(snapshot, "second") is True
    assert catalog.all_of("default", "app", KEY) == []
    later = house.catalog()
    assert later.quarantined("default", "app", KEY) == 1
    assert later.all_of("default", "app", KEY) == []


def test_a_success_in_between_forgives(catalog):
    snapshot = publish(catalog)
    catalog.count_bad(snapshot, "once")
    catalog.forgive(snapshot)
    assert catalog.count_bad(snapshot, "once more") is False
    assert catalog.all_of("default", "app", KEY) == [snapshot]


def test_a_new_one_replaces_older_ones_for_the_same_hosts_only(catalog, house):
    old = publish(catalog)
    poorer = publish(catalog, variant=replace(VARIANT, cpu_flags=frozenset({"sse2"})))
    damaged = publish(catalog)
    house.root(damaged).chmod(0o644)
    house.root(damaged).write_text("{")
    new = publish(catalog)
    assert set(catalog.drop_others_like(new)) == {old.name, damaged.name}
    left = {snapshot.name for snapshot in catalog.all_of("default", "app", KEY)}
    assert left == {new.name, poorer.name}


def test_of_one_in_quarantine_only_the_note_outlives_its_successor(catalog, tmp_path):
    bad = publish(catalog)
    for _ in range(2):
        catalog.count_bad(bad, "wrong answer")
    new = publish(catalog)
    assert catalog.drop_others_like(new) == [bad.name]
    notes = everything(tmp_path / "snapshots/default")
    assert [path.relative_to(tmp_path / "snapshots") for path in notes] == [
        Path("default/app", KEY, bad.name, "bad")
    ]
    assert catalog.quarantined("default", "app", KEY) == 1
    assert catalog.all_of("default", "app", KEY) == [new]


def test_what_goes_frees_what_only_it_needed(catalog, house):
    one = publish(catalog, same=b"s" * 5000)
    before = house.objects()
    other = publish(catalog, same=b"s" * 5000, variant=replace(VARIANT, cache_line_bytes=128))
    catalog.remove(next(each for each in catalog.everything() if each.name == other.name))
    assert house.objects() == before
    check(catalog, one)


def test_what_a_running_replica_holds_stays_until_it_is_collected(catalog, house):
    snapshot = publish(catalog)
    check(catalog, snapshot)
    count = house.objects()
    catalog.forget_app("default", "app")
    local = house.shelf("default").local
    assert house.objects() == count
    assert collect_local(local, 0.0).removed == 0
    house.folder.ledger.unpin("test")
    assert collect_local(local, 0.0).removed == count


def test_a_collection_takes_nothing_of_a_snapshot(catalog, house):
    snapshot = publish(catalog)
    assert collect_local(house.shelf("default").local, 0.0).removed == 0
    check(catalog, snapshot)


def test_forgetting_an_app_removes_all_its_snapshots_and_no_others(catalog, house):
    mine, other = publish(catalog), publish(catalog, app="other")
    publish(catalog, key="f" * 16)
    dotted = publish(catalog, app="app.also")
    assert len(catalog.forget_app("default", "app")) == 2
    assert not house.root(mine).exists()
    for kept in (other, dotted):
        check(catalog, kept)


def test_a_failure_of_what_has_been_forgotten_meanwhile_is_no_error(catalog, tmp_path):
    snapshot = publish(catalog)
    catalog.forget_app("default", "app")
    with pytest.raises(RestoreError, match="incomplete"):
        check(catalog, snapshot)
    assert catalog.count_bad(snapshot, "gone") is False
    catalog.forgive(snapshot)
    assert everything(tmp_path / "snapshots/default") == []


def test_it_appears_when_all_of_it_is_in_the_store(catalog, monkeypatch):
    seen = []
    write = Shelf.write

    def watched(self, shelved):
        seen.append(catalog.all_of("default", "app", KEY))
        assert self.faults(shelved) == []
        write(self, shelved)

    monkeypatch.setattr(Shelf, "write", watched)
    snapshot = publish(catalog)
    assert seen == [[]]
    assert catalog.all_of("default", "app", KEY) == [snapshot]
