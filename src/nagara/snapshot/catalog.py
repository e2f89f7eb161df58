"""The snapshots of one machine: found, published, verified, quarantined.

A snapshot is an image of the store: memory/ with the checkpoint tool's files, and layer.erofs with
what the replica had written before. What is known of it stands in the image's root, whose name is
APP.KEY.NAME; the root's appearing is the publication, and nothing of it changes afterwards. Beside
the store, for this machine alone:

    FOLDER/TENANT/APP/KEY/NAME/bad   one line per restore in a row that failed by its fault
    FOLDER/.staging/NAME/            a capture under way, and what it is about to put in the store

It holds a process's memory: folders are 0700, files 0600. Blocking: call from a worker thread.
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.base.durable import write_durably
from nagara.image.errors import BadTraceError
from nagara.image.images import Image
from nagara.image.shelf import Fault, Put, Shelf, Shelved
from nagara.image.trace import NO_TRACE, Trace, parse_touches, plain_touches
from nagara.sandbox.fault_points import reach
from nagara.sandbox.leftovers import kill_tools_in
from nagara.snapshot.errors import BadSnapshotError, RestoreError
from nagara.snapshot.variant import Variant

KIND = "snapshots"  # of the store's roots
MEMORY, LAYER = "memory", "layer.erofs"  # places in the image
_FORMAT = 4
_BAD_LIMIT = 2
_NOTED = "objects"  # file of a staging folder
_KEY = re.compile(r"[0-9a-f]{1,64}")
Elsewhere = Callable[[str, Sequence[Fault]], list[Fault]]
_NAME = re.compile(r"[0-9a-f]{16}")  # becomes a folder, and may come from outside


@dataclass(frozen=True, slots=True)
class FileMark:
    """A file of the machine that saved memory stems from: it must not have changed."""

    path: str
    size_bytes: int
    modified_ns: int

    def is_unchanged(self) -> bool:
        """Whether the file is still as it was marked."""
        try:
            state = os.stat(self.path)  # noqa: PTH116 - thousands of them before each restore
        except OSError:
            return False
        return (state.st_size, state.st_mtime_ns) == (self.size_bytes, self.modified_ns)

    def __str__(self) -> str:
        return f"{self.size_bytes} {self.modified_ns} {self.path}"

    @classmethod
    def parse(cls, text: str) -> "FileMark":
        """The reverse of `str`. Raises ValueError."""
        size, modified, path = text.split(" ", 2)
        return cls(path, int(size), int(modified))


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """What is known of a snapshot."""

    key: str
    variant: Variant
    canary_answer: str
    host_files: tuple[FileMark, ...]
    layer_digest: str  # of the frozen layer's listing
    created_at_s: float
    memory_bytes: int
    layer_bytes: int
    notes: tuple[str, ...] = ()  # what was left out
    sealed_by: str | None = None  # names the key that its files are encrypted with, if they are
    touches: Trace = NO_TRACE  # what of its image and models a replica put back will read

    def changed_host_file(self) -> str | None:
        """A mapped file of the machine that is not as it was; None when all are."""
        return next((mark.path for mark in self.host_files if not mark.is_unchanged()), None)

    def to_plain(self) -> dict[str, Any]:
        """The record as JSON values, with its format number."""
        plain = dataclasses.asdict(dataclasses.replace(self, host_files=(), touches=NO_TRACE))
        plain["variant"]["cpu_flags"] = sorted(self.variant.cpu_flags)
        plain["host_files"] = [str(mark) for mark in self.host_files]
        plain["touches"] = plain_touches(self.touches)
        return {"format": _FORMAT, **plain}

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> "SnapshotRecord":
        """The reverse. Raises ValueError, KeyError, TypeError, AttributeError or `BadTraceError`
        for anything else."""
        plain = dict(content)
        if plain.pop("format") != _FORMAT:
            raise ValueError("another format of snapshot")
        variant = _variant(plain.pop("variant"))
        marks = tuple(FileMark.parse(text) for text in plain.pop("host_files"))
        touches = parse_touches(plain.pop("touches"))
        notes, sealed_by = tuple(plain.pop("notes")), plain.pop("sealed_by")
        known = {"variant": variant, "host_files": marks, "notes": notes, "sealed_by": sealed_by}
        return cls(**known, touches=touches, **plain)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published snapshot. `name` is unique among all machines."""

    tenant: str
    app: str
    name: str
    record: SnapshotRecord
    image: Image


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot as it is listed; `snapshot` is None where its description is damaged."""

    tenant: str
    app: str
    key: str
    name: str
    snapshot: Snapshot | None


class Catalog:
    """The snapshots of one machine. Safe to use from several threads.

    Args:
        root: for what is this machine's alone.
        shelf: a tenant's snapshots in the store.
        tenants: who has a part of the store.
    """

    def __init__(
        self,
        root: Path,
        shelf: Callable[[str], Shelf],
        tenants: Callable[[], Sequence[str]],
    ) -> None:
        self._root = root
        self.shelf = shelf
        self._tenants = tenants

    # -- captures under way ------------------------------------------------------------------

    def staging(self) -> Path:
        """A new place to build a snapshot in; nothing is made yet."""
        return self._root / ".staging" / secrets.token_hex(8)

    def make_staging(self, staging: Path) -> None:
        """Makes the private folders of a `staging` place."""
        _make_private(staging / MEMORY)

    def clear_staging(self) -> None:
        """Ends and removes what interrupted captures have left. Call before any capture."""
        for old in self._root.glob(f"[!.]*/*/*/*/{MEMORY}"):  # before they were images
            shutil.rmtree(old.parent)
        staging = self._root / ".staging"
        if not staging.exists():
            return
        kill_tools_in(staging)
        for noted in staging.glob(f"*/{_NOTED}"):
            with contextlib.suppress(ValueError, KeyError):  # cut short: nothing had come yet
                note = json.loads(noted.read_bytes())
                self.shelf(note["tenant"]).undo(note["objects"])
        shutil.rmtree(staging, ignore_errors=True)

    def publish(self, staging: Path, tenant: str, app: str, record: SnapshotRecord) -> Put:
        """Makes a complete staging folder a snapshot, all at once; the folder is used up.

        Raises `StoreError`, OSError; nothing of it is left in the store then.
        """
        shelf = self.shelf(tenant)
        plan = shelf.plan(staging)
        reach("capture.named")
        noted: list[str] = []

        def note(objects: Sequence[str]) -> None:
            noted.extend(objects)
            content = json.dumps({"tenant": tenant, "objects": noted}).encode()
            write_durably(staging / _NOTED, content)
            reach("capture.noted")

        name = root_name(app, record.key, staging.name)
        try:
            put = shelf.put(
                staging, plan, name, record.to_plain(), note, lambda: reach("capture.stored")
            )
            reach("capture.published")
        except BaseException:
            shelf.remove(name)
            shelf.undo(noted)
            raise
        return put

    def keep_touches(self, snapshot: Snapshot, touches: Trace) -> bool:
        """Adds to a snapshot's description what replicas put back will read; False if there is no
        such snapshot any more. Raises `StoreError`, OSError."""
        record = dataclasses.replace(snapshot.record, touches=touches)
        name = root_name(snapshot.app, record.key, snapshot.name)
        kept = () if touches.excerpts is None else touches.excerpts.objects
        return self.shelf(snapshot.tenant).describe(name, record.to_plain(), kept)

    # -- finding -----------------------------------------------------------------------------

    def all_of(self, tenant: str, app: str, key: str) -> list[Snapshot]:
        """The readable, unquarantined snapshots under a key."""
        prefix = root_name(app, key, "")
        found = (snapshot_from(tenant, each) for each in self.shelf(tenant).all(prefix))
        return [each for each in found if each is not None and not self.is_quarantined(each)]

    def everything(self) -> list[Listed]:
        """All snapshots here, also damaged and quarantined ones."""
        return [listed for tenant in self._tenants() for listed in self._of_tenant(tenant)]

    def _of_tenant(self, tenant: str) -> Iterator[Listed]:
        for name, shelved in self.shelf(tenant).look():
            app, key, short = _parts(name)
            snapshot = None if shelved is None else snapshot_from(tenant, shelved)
            yield Listed(tenant, app, key, short, snapshot)

    def read(self, tenant: str, shelved: Shelved) -> Snapshot:
        """A snapshot from its image. Raises `BadSnapshotError` when its description is damaged."""
        snapshot = snapshot_from(tenant, shelved)
        if snapshot is None:
            raise BadSnapshotError("its description cannot be read", where=shelved.name)
        return snapshot

    # -- looking after -----------------------------------------------------------------------

    def check(self, snapshot: Snapshot, elsewhere: Elsewhere | None = None) -> None:
        """Checks that all of the snapshot can be had; what was proven is not read again.

        Args:
            elsewhere: those of a tenant's faults that other tiers do not make up for; None where
                there are no other tiers.

        Raises:
            BadSnapshotError: an object is damaged, and the snapshot in quarantine; or the tiers do
                not have what they said.
            RestoreError: objects were evicted from here, and the snapshot with them.
        """
        faults = self.shelf(snapshot.tenant).faults(Shelved(snapshot.image, {}))
        if faults and elsewhere is not None:
            faults = elsewhere(snapshot.tenant, faults)
        if not faults:
            return
        fault = next((fault for fault in faults if fault.is_wrong), faults[0])
        where = f"{snapshot.name}/{fault.path}"
        if fault.is_wrong:
            what = "does not have the content it was captured with"
            self.quarantine(snapshot, f"{fault.path} {what}")
            raise BadSnapshotError(what, where=where)
        what = "is incomplete: a part is not in the store"
        if elsewhere is not None:
            raise BadSnapshotError(what, where=where)
        self._remove(snapshot.tenant, snapshot.app, snapshot.record.key, snapshot.name)
        raise RestoreError(what, where=where)

    def drop_others_like(self, snapshot: Snapshot) -> list[str]:
        """Removes the older snapshots that this one, of the same key and host class, replaces.

        Returns their names. Of those in quarantine the note stays: it says whether another capture
        is worth its while.
        """
        shelf, dropped = self.shelf(snapshot.tenant), []
        for name, shelved in shelf.look(root_name(snapshot.app, snapshot.record.key, "")):
            short = _parts(name)[2]
            if short == snapshot.name:
                continue
            other = None if shelved is None else snapshot_from(snapshot.tenant, shelved)
            is_bad = other is not None and self.is_quarantined(other)
            if other is None or is_bad or other.record.variant == snapshot.record.variant:
                shelf.remove(name)
                if not is_bad:
                    shutil.rmtree(self._notes(snapshot).with_name(short), ignore_errors=True)
                dropped.append(short)
        return dropped

    def remove(self, listed: Listed) -> None:
        """Removes one snapshot and its notes."""
        self._remove(listed.tenant, listed.app, listed.key, listed.name)

    def _remove(self, tenant: str, app: str, key: str, name: str) -> None:
        self.shelf(tenant).remove(root_name(app, key, name))
        shutil.rmtree(self._root / tenant / app / key / name, ignore_errors=True)

    def forget_app(self, tenant: str, app: str) -> list[str]:
        """Removes all snapshots of an app; returns their names."""
        gone = []
        if tenant in self._tenants():  # others have nothing, and not all can have
            shelf = self.shelf(tenant)
            for name, _ in shelf.look(f"{app}."):
                if _parts(name)[0] == app:
                    shelf.remove(name)
                    gone.append(_parts(name)[2])
        shutil.rmtree(self._root / tenant / app, ignore_errors=True)
        return gone

    # -- quarantine --------------------------------------------------------------------------

    def reasons(self, snapshot: Snapshot) -> list[str]:
        """Why restores in a row have failed by the snapshot's own fault."""
        try:
            return (self._notes(snapshot) / "bad").read_text().splitlines()
        except FileNotFoundError:
            return []

    def is_quarantined(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has failed too often to be tried again."""
        return len(self.reasons(snapshot)) >= _BAD_LIMIT

    def count_bad(self, snapshot: Snapshot, reason: str, *, times: int = 1) -> bool:
        """Notes a failure; True when the snapshot is now in quarantine."""
        name = root_name(snapshot.app, snapshot.record.key, snapshot.name)
        if not self.shelf(snapshot.tenant).has(name):
            return False  # the app has been forgotten meanwhile
        _make_private(self._notes(snapshot))
        with (self._notes(snapshot) / "bad").open("a") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write((reason.replace("\n", " ") + "\n") * times)
        return self.is_quarantined(snapshot)

    def quarantine(self, snapshot: Snapshot, reason: str) -> None:
        """Sets it aside at once."""
        self.count_bad(snapshot, reason, times=_BAD_LIMIT)

    def forgive(self, snapshot: Snapshot) -> None:
        """Forgets the failures: the snapshot has given back a working replica."""
        (self._notes(snapshot) / "bad").unlink(missing_ok=True)

    def was_set_aside(self, tenant: str, name: str) -> bool:
        """Whether the snapshot that the store calls so is or was in quarantine here."""
        bad = self._root.joinpath(tenant, *_parts(name), "bad")
        return bad.exists() and len(bad.read_text().splitlines()) >= _BAD_LIMIT

    def quarantined(self, tenant: str, app: str, key: str) -> int:
        """How many snapshots under a key are or were in quarantine."""
        notes = (self._root / tenant / app / key).glob("*/bad")
        return sum(len(note.read_text().splitlines()) >= _BAD_LIMIT for note in notes)

    def _notes(self, snapshot: Snapshot) -> Path:
        return self._root / snapshot.tenant / snapshot.app / snapshot.record.key / snapshot.name


def root_name(app: str, key: str, name: str) -> str:
    """What the store calls a snapshot."""
    return f"{app}.{key}.{name}"


def _parts(name: str) -> tuple[str, str, str]:
    app, key, short = ["", "", *name.rsplit(".", 2)][-3:]
    return app, key, short


def snapshot_from(tenant: str, shelved: Shelved) -> Snapshot | None:
    """A snapshot from its image; None for one whose description is damaged."""
    try:
        app, key, short = _parts(shelved.name)
        record = SnapshotRecord.from_plain(shelved.about)
    except (ValueError, KeyError, TypeError, AttributeError, BadTraceError):
        return None
    if record.key != key or not _NAME.fullmatch(short):
        return None
    return Snapshot(tenant, app, short, record, shelved.image)


def far_entry(snapshot: Snapshot) -> dict[str, Any]:
    """What another machine must know of a snapshot to choose it."""
    record = snapshot.record
    variant = dataclasses.asdict(record.variant) | {"cpu_flags": sorted(record.variant.cpu_flags)}
    return {
        "key": record.key,
        "variant": variant,
        "created_at_s": record.created_at_s,
        "size_bytes": record.memory_bytes + record.layer_bytes,
        "touches": len(record.touches.objects) + (record.touches.excerpts is not None),
    }


def far_variants(
    entries: Mapping[str, Mapping[str, Any]], app: str, key: str
) -> dict[str, Variant]:
    """The variants of a key among what `far_entry` made, by the store's name for them; what is
    malformed is passed over."""
    found = {}
    for name, entry in entries.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            if is_snapshot_of(name, app) and _parts(name)[1] == entry["key"] == key:
                found[name] = _variant(entry["variant"])
    return found


def is_snapshot_of(name: str, app: str) -> bool:
    """Whether the store could call one of the app's snapshots so."""
    its_app, key, short = _parts(name)
    return its_app == app and bool(_NAME.fullmatch(short) and _KEY.fullmatch(key))


def _variant(content: Mapping[str, Any]) -> Variant:
    plain = dict(content)
    return Variant(frozenset(plain.pop("cpu_flags")), **plain)


def as_shelved(snapshot: Snapshot) -> Shelved:
    """The reverse of `snapshot_from`."""
    return Shelved(snapshot.image, snapshot.record.to_plain())


def _make_private(folder: Path) -> None:
    """Makes the folder and whatever is missing above it, readable by the owner alone."""
    for part in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
