"""Which capabilities this process has, and which users processes run as. See capabilities(7)."""

import os
from collections.abc import Iterable
from pathlib import Path

CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24


def has_capability(number: int) -> bool:
    """Whether the capability is in this process's effective set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def other_users(pids: Iterable[int]) -> set[int]:
    """User ids that the processes run as, besides this process's own."""
    return {uid for pid in pids if (uid := _user_of(pid)) is not None} - {os.geteuid()}


def _user_of(pid: int) -> int | None:
    """From `status`: the owner of the folder is root for a process that has given up root."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # ended meanwhile
        return None
    return next(int(line.split()[2]) for line in text.splitlines() if line.startswith("Uid:"))
