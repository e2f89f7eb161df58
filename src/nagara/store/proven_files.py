"""Large objects that may be read past whoever checks: second names of files that are proven.

    FOLDER/tenants/TENANT/proven/NAME    the same file as sha256/NAME

A mount puts this folder before its lazy data layer: what is in it is read as fast as any file of
the disk, and cached in the large pages that FUSE does not have. So a name is here only while the
file is in the state that was recorded after its content had been checked and had reached the
disk; each mount looks at those it may need (`offer`). Only large objects: they are few.

A second name changes the file's change time, so the record is written anew with it.

Called from any thread.
"""

import contextlib
import os
from pathlib import Path

from nagara.base.folder_lock import folder_lock
from nagara.store.ledger import Ledger, Proof
from nagara.store.names import ObjectName


class ProvenFiles:
    """One tenant's folder of second names."""

    def __init__(self, folder: Path, ledger: Ledger, tenant: str) -> None:
        self.folder = folder
        self._ledger = ledger
        self._tenant = tenant

    def offer(self, name: ObjectName, path: Path) -> bool:
        """The object at `path` is in the folder and as it was when it was proven.

        False when it is not proven (any more): then nobody reads it past the checks.
        """
        if self._is_offered(name, path):
            return True
        with folder_lock(self.folder):  # another process may be about the same
            if self._is_offered(name, path):
                return True
            self.withdraw(name)
            recorded = self._ledger.proof(self._tenant, str(name))
            if recorded is None:
                return False
            proof = _link(path, self.folder / str(name), recorded)
            if proof is None:
                return False
            self._ledger.prove(self._tenant, [(str(name), proof)])
        return True

    def withdraw(self, name: ObjectName) -> None:
        """Takes the second name away."""
        (self.folder / str(name)).unlink(missing_ok=True)

    def _is_offered(self, name: ObjectName, path: Path) -> bool:
        second = _state(self.folder / str(name))
        if second is None or second != _state(path):
            return False
        return second == self._ledger.proof(self._tenant, str(name))


def _link(path: Path, second: Path, proof: Proof) -> Proof | None:
    """Gives a file its second name; the proof of what it is then.

    None, and no second name, when the file is not the one that was proven, or was written to
    meanwhile, or where files have one name only.
    """
    try:
        before = path.stat()
        if _proof(before) != proof:
            return None
        with contextlib.suppress(FileExistsError):
            os.link(path, second)
        after = second.stat()
    except OSError:  # gone, a full disk, a file system without links
        second.unlink(missing_ok=True)
        return None
    if (after.st_ino, after.st_size, after.st_mtime_ns) != (
        before.st_ino, before.st_size, before.st_mtime_ns,
    ):  # fmt: skip
        second.unlink(missing_ok=True)
        return None
    return _proof(after)


def _state(path: Path) -> Proof | None:
    """What a proof of the file at `path` would be now; None when there is none."""
    try:
        return _proof(path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def _proof(state: os.stat_result) -> Proof:
    return Proof(state.st_ino, state.st_size, state.st_ctime_ns)
