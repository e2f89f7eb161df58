"""One control process for each state folder."""

import fcntl
import os
from pathlib import Path

from nagara.control.errors import StateBusyError


def take_lock(folder: Path) -> int:
    """An exclusive lock that ends with the process, however that ends; its descriptor.

    Raises:
        StateBusyError: another process has it.
    """
    path = folder / "control.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StateBusyError(
            f"another control process (pid {owner or 'unknown'}) is using this state",
            where=str(folder),
            hint="stop it, or choose another folder with --state",
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
