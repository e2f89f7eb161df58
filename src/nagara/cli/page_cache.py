"""The page cache as a condition of a measurement: emptied, and proven cold by a counter."""

import os
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")
_VMSTAT = Path("/proc/vmstat")


def can_drop() -> bool:
    """Whether this process may empty the page cache (root, and not in a container)."""
    try:
        with _DROP.open("wb"):
            return True
    except OSError:
        return False


def drop() -> None:
    """Writes everything back and empties the page cache."""
    os.sync()
    _DROP.write_text("3\n")


def read_from_disk_bytes() -> int:
    """Bytes paged in from disks since boot: what two readings differ by was not cached."""
    for line in _VMSTAT.read_text().splitlines():
        name, value = line.split()
        if name == "pgpgin":
            return int(value) * 1024
    return 0
