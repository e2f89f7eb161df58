"""One writer at a time in a folder, also across processes.

The kernel drops the lock when its holder ends, however it ends: nothing is left to clean up.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Makes the folder if need be and holds it; blocks while another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
