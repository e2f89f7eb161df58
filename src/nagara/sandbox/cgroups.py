"""The control groups of a container: who is left in them, and taking them away. Needs root.

Works for the unified hierarchy and for the older one with a tree per controller.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
PARENT = "nagara"


def cgroup_folders(container: str) -> Iterator[Path]:
    """The container's group in each hierarchy where it has one."""
    for hierarchy in (_MOUNT, *_hierarchies()):
        folder = hierarchy / PARENT / container
        if folder.is_dir():
            yield folder


def _hierarchies() -> Iterator[Path]:
    if _MOUNT.is_dir():
        yield from (path for path in _MOUNT.iterdir() if path.is_dir() and path.name != PARENT)


def kill_cgroup(container: str) -> int:
    """SIGKILLs whatever is left in the container's groups; returns how many that were."""
    pids = {pid for folder in cgroup_folders(container) for pid in _members(folder)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _members(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def remove_cgroup(container: str) -> None:
    """Removes the container's empty groups. Groups with processes are left (EBUSY)."""
    for folder in list(cgroup_folders(container)):
        for inner, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(inner).rmdir()
