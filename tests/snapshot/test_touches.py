"""What starts elsewhere read is kept with a snapshot, and goes with it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nagara.image.excerpts import make_excerpts
from nagara.image.shelf import Shelf
from nagara.image.trace import NO_TRACE, Trace
from nagara.snapshot.catalog import (
    KIND,
    Catalog,
    Snapshot,
    SnapshotRecord,
    as_shelved,
    far_entry,
    snapshot_from,
)
from nagara.snapshot.variant import Variant
from nagara.store.collecting import collect_local
from nagara.store.local import ObjectFolder
from nagara.store.names import WHOLE_LIMIT_BYTES, ObjectName, name_bytes
from nagara.store.roots import read_list
from nagara.store.store import Store

KEY = "0123456789abcdef"
RECORD = SnapshotRecord(
    key=KEY,
    variant=Variant(frozenset({"sse2"}), 3632, 64),
    canary_answer="yes",
    host_files=(),
    layer_digest="ab" * 32,
    created_at_s=1.5,
    memory_bytes=10_000,
    layer_bytes=4096,
)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    folder = ObjectFolder(tmp_path / "store")
    store = Store(folder.tenant("default"))
    yield Catalog(tmp_path / "snapshots", lambda _: Shelf(store, KIND), folder.tenant_names)
    store.close()
    folder.close()


def publish(catalog: Catalog) -> Snapshot:
    staging = catalog.staging()
    catalog.make_staging(staging)
    (staging / "memory/pages-1.img").write_bytes(bytes(10_000))
    (staging / "layer.erofs").write_bytes(bytes(4096))
    found = snapshot_from("default", catalog.publish(staging, "default", "app", RECORD).shelved)
    assert found is not None
    return found


def test_what_a_restored_one_reads_is_added_to_its_description(catalog: Catalog) -> None:
    snapshot = publish(catalog)
    assert snapshot.record.touches == NO_TRACE
    large = ObjectName(bytes(32), WHOLE_LIMIT_BYTES + 1)
    touches = Trace(((name_bytes(b"small"), ()), (large, (0, 7))))
    assert catalog.keep_touches(snapshot, touches)
    (found,) = catalog.all_of("default", "app", KEY)
    assert found.record == replace(snapshot.record, touches=touches)
    assert found.image == snapshot.image
    assert far_entry(found) != far_entry(snapshot)  # so it is brought to the zone again
    catalog.forget_app("default", "app")
    assert not catalog.keep_touches(snapshot, touches)
    assert catalog.all_of("default", "app", KEY) == []


def test_excerpts_live_as_long_as_the_snapshot_that_they_belong_to(catalog: Catalog) -> None:
    snapshot = publish(catalog)
    store = catalog.shelf("default").store
    library = store.put_bytes(bytes(200_000))
    touches = Trace((), excerpts=make_excerpts(store, {library: [0, 2]}))
    assert catalog.keep_touches(snapshot, touches)
    (found,) = catalog.all_of("default", "app", KEY)
    assert found.record.touches == touches
    assert far_entry(found) != far_entry(snapshot)
    collect_local(store.local, grace_s=0)
    assert not store.local.has(library)
    assert touches.excerpts is not None
    [kept] = touches.excerpts.objects
    assert store.local.has(kept)
    assert kept in read_list(store, as_shelved(found).to_root(KIND).lists[1])  # it is pushed, too
    catalog.forget_app("default", "app")
    assert not store.local.has(kept)
