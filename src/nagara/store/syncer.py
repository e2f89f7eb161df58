"""Brings adopted objects to the disk behind everyone's back, then records that they are proven.

A start does not wait for the disk: an object may be read as soon as it was verified. But it is
trusted after a crash only if it was on the disk before the record said so; therefore the order
here is fsync, then record. One thread, owned by the `ObjectFolder`.
"""

import ctypes
import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

from nagara.store.ledger import Ledger, Proof

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
# From this many files on one flush of the file system is cheaper than one of each file.
_MANY = 256
# So long a burst gathers: a start that fetches shall not share the disk with its own flushes.
_GATHER_S = 2.0


class _Adopted(NamedTuple):
    tenant: str
    path: Path
    proof: Proof


class Syncer:
    """The thread and its queue. `add` and `flush` from any thread."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._folder = folder
        self._changed = threading.Condition()
        self._queue: list[_Adopted] = []
        self._is_busy = False
        self._is_closed = False
        self._flushes = 0  # who waits for it
        self._thread: threading.Thread | None = None

    def add(self, tenant: str, path: Path, proof: Proof) -> None:
        """The file at `path` was verified when it was in the state `proof`."""
        with self._changed:
            self._queue.append(_Adopted(tenant, path, proof))
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when everything added so far is on the disk and recorded."""
        with self._changed:
            self._flushes += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: (not self._queue and not self._is_busy) or self._thread is None
                )
            finally:
                self._flushes -= 1

    def close(self) -> None:
        """Works the queue off and ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                self._changed.wait_for(lambda: self._is_closed or self._flushes, _GATHER_S)
                batch, self._queue = self._queue, []
                self._is_busy = True
            try:
                self._settle(batch)
            except Exception:  # noqa: BLE001 - the thread's root; objects just stay unproven
                _log.exception("adopted objects could not be brought to the disk")
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _settle(self, batch: list[_Adopted]) -> None:
        by_tenant: dict[str, list[tuple[str, Proof]]] = {}
        folders = {entry.path.parent for entry in batch}
        if len(batch) >= _MANY:
            _sync_file_system(self._folder)
            there = batch
        else:
            there = [entry for entry in batch if _sync(entry.path)]
            for folder in folders:
                _sync(folder)
        for entry in there:
            by_tenant.setdefault(entry.tenant, []).append((entry.path.name, entry.proof))
        for tenant, proofs in by_tenant.items():
            self._ledger.prove(tenant, proofs)


def _sync(path: Path) -> bool:
    """False when the file is gone: evicted meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _sync_file_system(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
