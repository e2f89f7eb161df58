"""Snapshots on disk: whole or not there, verified, set aside."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nagara.snapshot.catalog import Catalog, FileMark, SnapshotRecord, digests
from nagara.snapshot.errors import BadSnapshotError, HostMisfitError
from nagara.snapshot.variant import Variant

KEY = "0123456789abcdef"
VARIANT = Variant(frozenset({"avx2", "sse2"}), 3632, 64)


@pytest.fixture
def catalog(tmp_path):
    return Catalog(tmp_path / "snapshots")


def publish(catalog, *, key=KEY, app="app", variant=VARIANT, host_files=(), tenant="default"):
    staging = catalog.staging()
    catalog.make_staging(staging)
    for number in range(3):
        (staging / f"memory/pages-{number}.img").write_bytes(os.urandom(10_000))
    (staging / "memory/core.img").write_bytes(b"core")
    (staging / "layer.erofs").write_bytes(os.urandom(4096))
    record = SnapshotRecord(
        key=key,
        variant=variant,
        canary_answer='200 "yes"\n',
        host_files=host_files,
        files=digests(staging),
        layer_digest="ab" * 32,
        created_at_s=1.5,
        memory_bytes=30_004,
        layer_bytes=4096,
    )
    return catalog.publish(staging, tenant, app, record)


def everything(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_published_is_found_with_the_same_record(catalog):
    snapshot = publish(catalog)
    (found,) = catalog.all_of("default", "app", KEY)
    assert found == snapshot
    catalog.verify(found)


def test_another_tenant_app_or_key_does_not_find_it(catalog):
    publish(catalog)
    assert catalog.all_of("other", "app", KEY) == []
    assert catalog.all_of("default", "other", KEY) == []
    assert catalog.all_of("default", "app", "f" * 16) == []


def test_only_its_owner_may_read_it(catalog):
    snapshot = publish(catalog)
    assert {path.stat().st_mode & 0o777 for path in everything(snapshot.folder)} == {0o600}
    folders = [snapshot.folder / "memory", snapshot.folder, *snapshot.folder.parents][:6]
    assert folders[-1].name == "snapshots"
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_an_unfinished_capture_is_never_found_and_is_cleared_away(catalog, tmp_path):
    staging = catalog.staging()
    catalog.make_staging(staging)
    (staging / "layer.erofs").write_bytes(b"half")
    assert catalog.all_of("default", "app", KEY) == []
    catalog.clear_staging()
    assert not staging.exists()


@pytest.mark.parametrize("name", ["memory/pages-1.img", "memory/core.img", "layer.erofs"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "grow", "remove"])
def test_harm_to_any_file_is_noticed_also_after_a_first_good_check(catalog, name, harm):
    snapshot = publish(catalog)
    catalog.verify(snapshot)
    path = snapshot.folder / name
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "truncate":
        del content[-1]
    elif harm == "grow":
        content += b"\0"
    path.write_bytes(content)
    if harm == "remove":
        path.unlink()
    with pytest.raises(BadSnapshotError):
        catalog.verify(snapshot)


@pytest.mark.parametrize("name", ["memory/pages-1.img", "memory/core.img", "layer.erofs"])
def test_a_flipped_byte_is_noticed_by_a_new_process_also_with_times_put_back(
    catalog, tmp_path, name
):
    snapshot = publish(catalog)
    path = snapshot.folder / name
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(BadSnapshotError, match=f"{snapshot.name}/{name}"):
        Catalog(tmp_path / "snapshots").verify(snapshot)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', '{"format": 1}', "\xff"])
def test_damaged_metadata_is_as_if_it_were_not_there(catalog, text):
    snapshot = publish(catalog)
    (snapshot.folder / "snapshot.json").write_text(text)
    assert catalog.all_of("default", "app", KEY) == []


def test_any_single_missing_field_of_the_metadata_is_damage(catalog):
    snapshot = publish(catalog)
    path = snapshot.folder / "snapshot.json"
    whole = json.loads(path.read_text())
    for name in whole:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        assert catalog.all_of("default", "app", KEY) == [], name
    path.write_text(json.dumps(whole))
    assert catalog.all_of("default", "app", KEY) == [snapshot]


def test_a_changed_file_of_the_machine_is_the_hosts_misfit(catalog, tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"code")
    state = library.stat()
    mark = FileMark(str(library), state.st_size, state.st_mtime_ns)
    snapshot = publish(catalog, host_files=(mark,))
    catalog.verify(snapshot)
    assert snapshot.record.changed_host_file() is None
    os.utime(library, ns=(0, state.st_mtime_ns + 1))
    assert snapshot.record.changed_host_file() == str(library)
    with pytest.raises(HostMisfitError, match="has changed"):
        catalog.verify(snapshot)
    library.unlink()
    with pytest.raises(HostMisfitError):
        catalog.verify(snapshot)


def test_the_second_failure_in_a_row_puts_it_in_quarantine_for_good(catalog, tmp_path):
    snapshot = publish(catalog)
    assert catalog.count_bad(snapshot, "first\nreason") is False
    assert catalog.all_of("default", "app", KEY) == [snapshot]
    assert catalog.quarantined("default", "app", KEY) == 0
    assert catalog.count_bad(snapshot, "second") is True
    assert catalog.all_of("default", "app", KEY) == []
    later = Catalog(tmp_path / "snapshots")
    assert later.quarantined("default", "app", KEY) == 1
    assert later.all_of("default", "app", KEY) == []


def test_a_success_in_between_forgives(catalog):
    snapshot = publish(catalog)
    catalog.count_bad(snapshot, "once")
    catalog.forgive(snapshot)
    assert catalog.count_bad(snapshot, "once more") is False
    assert catalog.all_of("default", "app", KEY) == [snapshot]


def test_a_new_one_replaces_older_ones_for_the_same_hosts_only(catalog):
    old = publish(catalog)
    poorer = publish(catalog, variant=replace(VARIANT, cpu_flags=frozenset({"sse2"})))
    damaged = publish(catalog)
    (damaged.folder / "snapshot.json").write_text("{")
    new = publish(catalog)
    assert set(catalog.drop_others_like(new)) == {old.folder, damaged.folder}
    left = {snapshot.name for snapshot in catalog.all_of("default", "app", KEY)}
    assert left == {new.name, poorer.name}


def test_of_one_in_quarantine_only_the_note_outlives_its_successor(catalog):
    bad = publish(catalog)
    for _ in range(2):
        catalog.count_bad(bad, "wrong answer")
    new = publish(catalog)
    assert catalog.drop_others_like(new) == []
    assert sorted(path.name for path in bad.folder.iterdir()) == ["bad", "snapshot.json"]
    assert catalog.quarantined("default", "app", KEY) == 1
    assert catalog.all_of("default", "app", KEY) == [new]


def test_forgetting_an_app_removes_all_its_snapshots_and_no_others(catalog):
    mine, other = publish(catalog), publish(catalog, app="other")
    publish(catalog, key="f" * 16)
    folders = catalog.forget_app("default", "app")
    assert mine.folder in folders
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    catalog.verify(other)


def test_a_failure_of_what_has_been_forgotten_meanwhile_is_no_error(catalog):
    snapshot = publish(catalog)
    catalog.forget_app("default", "app")
    with pytest.raises(BadSnapshotError, match="incomplete"):
        catalog.verify(snapshot)
    assert catalog.count_bad(snapshot, "gone") is False
    catalog.forgive(snapshot)


def test_publishing_makes_the_folder_visible_at_once_and_complete(catalog, monkeypatch):
    seen = []
    rename = Path.rename

    def watched(self, target):
        if self.parent.name == ".staging":
            names = sorted(path.name for path in self.iterdir())
            seen.append((catalog.all_of("default", "app", KEY), names))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    snapshot = publish(catalog)
    assert seen == [([], ["layer.erofs", "memory", "snapshot.json"])]
    assert catalog.all_of("default", "app", KEY) == [snapshot]
