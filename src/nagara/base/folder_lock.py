"""One writer at a time in a folder, also across processes.

The kernel drops the lock when its holder ends, however it ends: nothing is left to clean up.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nagara.base.errors import NagaraError


class FolderBusyError(NagaraError):
    """Another process holds the folder."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Makes the folder if need be and holds it; blocks while another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def only_holder(folder: Path, name: str, hint: str) -> Iterator[None]:
    """Holds the folder under `name`, or raises `FolderBusyError` at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusyError("is in use", where=str(folder), hint=hint) from None
        yield
