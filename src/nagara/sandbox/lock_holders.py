"""Who holds a locked file, read from the kernel's own list: looking takes no lock away.

See proc_locks(5). Blocking, below a millisecond.
"""

import os
from pathlib import Path

_LOCKS = Path("/proc/locks")


def is_locked(path: Path) -> bool:
    """Whether some process holds a flock(2) on the file; False when there is no such file."""
    try:
        state = path.stat()
    except OSError:
        return False
    wanted = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    for line in _LOCKS.read_text().splitlines():
        fields = line.split()  # NUMBER: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        if fields[1] == "FLOCK" and fields[5] == wanted:
            return True
    return False
