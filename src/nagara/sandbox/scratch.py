"""A folder to try things out in, below the state folder: on the disk that replicas use."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nagara.base.folder_lock import only_holder

PREFIX = "doctor-"
LOCK = ".lock"  # held for as long as the folder is in use


@contextmanager
def scratch_folder(state: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards; one left by a killed process has nobody's lock.

    Where there is no state folder yet it lies beside where that will be, or with the system's
    temporary files.
    """
    place = next((folder for folder in (state, *state.parents) if folder.is_dir()), Path("/"))
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    except OSError:  # not ours to write to
        folder = Path(tempfile.mkdtemp(prefix=f"nagara-{PREFIX}"))
    try:
        with only_holder(folder, LOCK, "it is another process's"):
            yield folder
    finally:
        shutil.rmtree(folder)
