"""The snapshots of one machine on disk: found, published, verified, quarantined.

    TENANT/APP/KEY/NAME/snapshot.json   what it is, what it needs, digests of its files
                        memory/         the checkpoint tool's files
                        layer.erofs     what the replica had written before
                        bad             one line per restore in a row that failed by its fault

A snapshot is published by renaming its complete folder into place and never changed afterwards.
It holds a process's memory: folders are 0700, files 0600. Blocking: call from a worker thread.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.base.durable import sync_folder, write_durably
from nagara.sandbox.fault_points import reach
from nagara.sandbox.leftovers import kill_tools_in
from nagara.snapshot.errors import BadSnapshotError, HostMisfitError
from nagara.snapshot.variant import Variant

_FORMAT = 1
_BAD_LIMIT = 2
_HASH_THREADS = 2


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


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The content of snapshot.json."""

    key: str
    variant: Variant
    canary_answer: str
    host_files: tuple[FileMark, ...]
    files: dict[str, tuple[int, str]]  # name → size, sha256
    layer_digest: str  # of the frozen layer's listing
    created_at_s: float
    memory_bytes: int
    layer_bytes: int
    notes: tuple[str, ...] = ()  # what was left out

    def changed_host_file(self) -> str | None:
        """A mapped file of the machine that is not as it was; None when all are."""
        return next((mark.path for mark in self.host_files if not mark.is_unchanged()), None)

    def to_json(self) -> bytes:
        """The record with its format number."""
        plain = dataclasses.asdict(self)
        plain["variant"]["cpu_flags"] = sorted(self.variant.cpu_flags)
        return json.dumps({"format": _FORMAT, **plain}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "SnapshotRecord":
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        plain: Any = json.loads(text)
        if not isinstance(plain, dict) or plain.pop("format") != _FORMAT:
            raise ValueError("another format of snapshot")
        variant = plain.pop("variant")
        marks = tuple(FileMark(**mark) for mark in plain.pop("host_files"))
        files = {name: (size, digest) for name, (size, digest) in plain.pop("files").items()}
        flags = frozenset(variant.pop("cpu_flags"))
        notes = tuple(plain.pop("notes"))
        variants = Variant(flags, **variant)
        return cls(variant=variants, host_files=marks, files=files, notes=notes, **plain)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A published snapshot."""

    folder: Path
    record: SnapshotRecord

    @property
    def name(self) -> str:
        """Unique on this machine."""
        return self.folder.name

    @property
    def memory(self) -> Path:
        """Folder of the checkpoint tool's files."""
        return self.folder / "memory"

    @property
    def layer(self) -> Path:
        """The frozen upper layer."""
        return self.folder / "layer.erofs"


class Catalog:
    """The snapshots below one folder. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._verified: dict[Path, tuple[tuple[int, ...], ...]] = {}

    def staging(self) -> Path:
        """A new place to build a snapshot in; nothing is made yet."""
        return self._root / ".staging" / secrets.token_hex(8)

    def make_staging(self, staging: Path) -> None:
        """Makes the private folders of a `staging` place."""
        _make_private(staging / "memory")

    def clear_staging(self) -> None:
        """Ends and removes what interrupted captures have left. Call before any capture."""
        staging = self._root / ".staging"
        if staging.exists():
            kill_tools_in(staging)
            shutil.rmtree(staging, ignore_errors=True)

    def all_of(self, tenant: str, app: str, key: str) -> list[Snapshot]:
        """The readable, unquarantined snapshots under a key."""
        found = []
        for folder in sorted((self._root / tenant / app / key).glob("*")):
            try:
                record = SnapshotRecord.from_json((folder / "snapshot.json").read_bytes())
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged metadata: as if it were not there; `forget_app` removes it
            if self.bad_count(folder) < _BAD_LIMIT:
                found.append(Snapshot(folder, record))
        return found

    def everything(self) -> list[tuple[str, str, Path]]:
        """All published snapshots, also damaged and quarantined ones: tenant, app, folder."""
        folders = sorted(self._root.glob("[!.]*/*/*/*"))
        return [(folder.parts[-4], folder.parts[-3], folder) for folder in folders]

    def publish(self, staging: Path, tenant: str, app: str, record: SnapshotRecord) -> Snapshot:
        """Makes a complete staging folder visible, all at once."""
        for path in staging.rglob("*"):
            if path.is_file():
                path.chmod(0o600)
                _sync_file(path)
        write_durably(staging / "snapshot.json", record.to_json())
        reach("capture.described")
        sync_folder(staging / "memory")
        parent = self._root / tenant / app / record.key
        _make_private(parent)
        target = parent / staging.name
        staging.rename(target)
        reach("capture.published")
        sync_folder(parent)
        snapshot = Snapshot(target, record)
        self._verified[target] = _identity(snapshot)  # its digests were taken from these files
        return snapshot

    def verify(self, snapshot: Snapshot) -> None:
        """Checks that files are those that were captured.

        Sizes and identities every time; contents once per process and whenever an identity
        (inode, size, times) has changed since.

        Raises:
            HostMisfitError: a mapped file of the machine has changed.
            BadSnapshotError: a file of the snapshot is missing or damaged.
        """
        if changed := snapshot.record.changed_host_file():
            raise HostMisfitError("has changed since the snapshot was made", where=changed)
        try:
            identity = _identity(snapshot)
        except OSError as error:
            raise BadSnapshotError(f"is incomplete: {error}", where=snapshot.name) from error
        if self._verified.get(snapshot.folder) == identity:
            return
        actual = digests(snapshot.folder)
        for name, expected in snapshot.record.files.items():
            if actual.get(name) != expected:
                raise BadSnapshotError(
                    "does not have the content it was captured with",
                    where=f"{snapshot.name}/{name}",
                )
        self._verified[snapshot.folder] = identity

    def drop_others_like(self, snapshot: Snapshot) -> list[Path]:
        """Removes the older snapshots that this one, of the same key and host class, replaces.

        Of those in quarantine the memory goes and the note stays: it says whether another
        capture is worth its while.
        """
        dropped = []
        for folder in snapshot.folder.parent.iterdir():
            if folder == snapshot.folder:
                continue
            if self.bad_count(folder) >= _BAD_LIMIT:
                shutil.rmtree(folder / "memory", ignore_errors=True)
                (folder / "layer.erofs").unlink(missing_ok=True)
                continue
            try:
                record = SnapshotRecord.from_json((folder / "snapshot.json").read_bytes())
            except (OSError, ValueError, KeyError, TypeError):
                record = None  # damaged: nobody can use it
            if record is None or record.variant == snapshot.record.variant:
                shutil.rmtree(folder, ignore_errors=True)
                dropped.append(folder)
        return dropped

    def bad_count(self, folder: Path) -> int:
        """How many restores in a row have failed by the snapshot's own fault."""
        try:
            return len((folder / "bad").read_text().splitlines())
        except FileNotFoundError:
            return 0

    def is_quarantined(self, folder: Path) -> bool:
        """Whether a snapshot has failed too often to be tried again."""
        return self.bad_count(folder) >= _BAD_LIMIT

    def count_bad(self, snapshot: Snapshot, reason: str) -> bool:
        """Notes a failure; True when the snapshot is now in quarantine."""
        with (
            contextlib.suppress(FileNotFoundError),  # the app has been forgotten meanwhile
            (snapshot.folder / "bad").open("a") as file,
        ):
            os.fchmod(file.fileno(), 0o600)
            file.write(reason.replace("\n", " ") + "\n")
        self._verified.pop(snapshot.folder, None)
        return self.bad_count(snapshot.folder) >= _BAD_LIMIT

    def forgive(self, snapshot: Snapshot) -> None:
        """Forgets the failures: the snapshot has given back a working replica."""
        (snapshot.folder / "bad").unlink(missing_ok=True)

    def quarantined(self, tenant: str, app: str, key: str) -> int:
        """How many snapshots under a key are in quarantine."""
        folders = (self._root / tenant / app / key).glob("*")
        return sum(self.bad_count(folder) >= _BAD_LIMIT for folder in folders)

    def forget_app(self, tenant: str, app: str) -> list[Path]:
        """Removes all snapshots of an app; returns the folders they were in."""
        folders = list((self._root / tenant / app).glob("*/*"))
        shutil.rmtree(self._root / tenant / app, ignore_errors=True)
        return folders


def digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of the memory files and the layer in a snapshot's folder."""
    files = [path for path in sorted((folder / "memory").iterdir()) if path.is_file()]
    files.append(folder / "layer.erofs")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes = pool.map(_sha256, files)
        sizes = [path.stat().st_size for path in files]
        names = [str(path.relative_to(folder)) for path in files]
        return {
            name: (size, digest) for name, size, digest in zip(names, sizes, hashes, strict=True)
        }


def _make_private(folder: Path) -> None:
    """Makes the folder and whatever is missing above it, readable by the owner alone."""
    for part in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(snapshot: Snapshot) -> tuple[tuple[int, ...], ...]:
    states = [(snapshot.folder / name).stat() for name in sorted(snapshot.record.files)]
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
