"""What replicas wrote, kept for a while after they have ended. Blocking: worker threads.

TENANT/APP/REPLICA.log   written by the keeper
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from nagara.contract.node import ReplicaGoneError
from nagara.node.replica_folder import ReplicaRecord

_KEPT_PER_APP = 20
_LAST_LINES = 12


class ReplicaLogs:
    """The logs below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = threading.Lock()

    def path_for(self, record: ReplicaRecord) -> Path:
        """Where a replica's output goes. Does not block."""
        return self._root / record.tenant / record.app / f"{record.replica}.log"

    def prepare(self, record: ReplicaRecord, existing: Collection[str]) -> None:
        """Makes the folder of `path_for`; the oldest logs of the app make room.

        Args:
            existing: replicas whose logs stay, being still written to.
        """
        folder = self._root / record.tenant / record.app
        with self._turn:  # replicas of one app may start at the same time
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            logs = sorted(folder.glob("*.log"), key=_modified_s)
            for old in logs[: max(0, len(logs) - _KEPT_PER_APP + 1)]:
                if old.stem not in existing:
                    old.unlink(missing_ok=True)
                    old.with_name(old.name + ".1").unlink(missing_ok=True)

    def ended(self, running: Collection[str]) -> list[Path]:
        """Logs of replicas that are not among `running`."""
        return [path for path in self._root.glob("*/*/*.log") if path.stem not in running]

    def remove(self, log: Path) -> int:
        """Removes one of them, with what was rotated; how many bytes that frees."""
        freed_bytes = 0
        with self._turn:
            for path in (log, log.with_name(log.name + ".1")):
                with contextlib.suppress(FileNotFoundError):
                    freed_bytes += path.stat().st_blocks * 512
                    path.unlink()
        return freed_bytes

    def tail(self, replica: str, tail_bytes: int) -> bytes:
        """The last bytes of a replica's output. Raises `ReplicaGoneError`."""
        for path in self._root.glob(f"*/*/{replica}.log"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # being rotated
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
                return file.read()
        raise ReplicaGoneError("no log of such a replica is kept", where=replica)

    def last_lines(self, replica: str) -> str:
        """The last lines of a replica's output as text; empty when there are none."""
        try:
            text = self.tail(replica, 4096).decode(errors="replace")
        except ReplicaGoneError:
            return ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def forget_app(self, tenant: str, app: str) -> None:
        """Removes the logs of an app."""
        with self._turn:
            shutil.rmtree(self._root / tenant / app, ignore_errors=True)


def _modified_s(log: Path) -> float:
    """When it was last written to; the keeper may be rotating it."""
    try:
        return log.stat().st_mtime
    except FileNotFoundError:
        return 0.0
