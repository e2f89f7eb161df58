"""What a node keeps on disk about one replica, written before anything is made for it.

    ID/record.json     whose replica it is; `ready` once it may serve
       upper/ work/    its own layer of the root file system
       root/           where the root is mounted
       snapshot/       where the snapshot is mounted while it is restored
       opened/         its files in memory, where they are encrypted
       bundle/         what the OCI runtime reads
       criu/           logs of the checkpoint tool
       pid             the first process, written by the runtime

After a crash the folder says what may exist outside: mounts below it, a container and a cgroup
of its name. Removal is therefore the last step of taking a replica down.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nagara.contract.replica import Lease
from nagara.image.mounts import mount_points


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Whose replica a folder is."""

    replica: str
    tenant: str
    app: str
    definition: str
    lease: Lease
    port: int
    is_capture: bool = False
    ready: bool = False
    devices: tuple[str, ...] = ()
    disk_limit_bytes: int | None = None


_RECORD = TypeAdapter(ReplicaRecord)


@dataclass(frozen=True, slots=True)
class ReplicaFolder:
    """The paths of one replica."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def control_group(self) -> str:
        """Control groups are the whole machine's: unlike the name, unique among all its nodes."""
        return f"{hashlib.sha256(os.fsencode(self.path.parent)).hexdigest()[:8]}-{self.name}"

    @property
    def upper(self) -> Path:
        return self.path / "upper"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def root(self) -> Path:
        return self.path / "root"

    @property
    def snapshot(self) -> Path:
        return self.path / "snapshot"

    @property
    def opened(self) -> Path:
        return self.path / "opened"

    @property
    def bundle(self) -> Path:
        return self.path / "bundle"

    @property
    def criu(self) -> Path:
        return self.path / "criu"

    @property
    def pid_file(self) -> Path:
        return self.path / "pid"

    def create(self, record: ReplicaRecord) -> None:
        """Makes the folder with its record; FileExistsError when there is one of that name."""
        self.path.mkdir(mode=0o700, parents=True)
        self.write(record)
        for part in (self.upper, self.work, self.root, self.bundle, self.criu):
            part.mkdir()

    def empty(self) -> None:
        """Back to what `create` made, so that another way of starting can be tried."""
        self.pid_file.unlink(missing_ok=True)
        for part in (self.upper, self.work, self.bundle, self.criu):
            shutil.rmtree(part)
            part.mkdir()

    def write(self, record: ReplicaRecord) -> None:
        """Replaces the record at once.

        Not flushed to the disk: after a power cut there is no replica left to take over.
        """
        temporary = self.path / "record.json.new"
        temporary.write_bytes(_RECORD.dump_json(record))
        temporary.replace(self.path / "record.json")

    def read(self) -> ReplicaRecord | None:
        """The record; None where the folder was left before it was written, or is damaged."""
        try:
            return _RECORD.validate_json((self.path / "record.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def remove(self) -> None:
        """Deletes the folder. Refuses (RuntimeError) while something is mounted below it."""
        if mounted := mount_points(self.path):
            raise RuntimeError(f"{mounted[0].target} is still mounted; nothing was deleted")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)


def replica_folders(parent: Path) -> Iterator[ReplicaFolder]:
    """All replicas' folders below `parent`."""
    if parent.is_dir():
        for path in sorted(parent.iterdir()):
            if path.is_dir():
                yield ReplicaFolder(path)
