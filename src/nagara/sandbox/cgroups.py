"""The control groups of a container: who is left in them, and taking them away. Needs root.

Works for the unified hierarchy and for the older one with a tree per controller.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
PARENT = "nagara"
_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.01
_END_S = 30.0


def cgroup_folders(container: str) -> Iterator[Path]:
    """The container's group in each hierarchy where it has one."""
    for hierarchy in (_MOUNT, *_hierarchies()):
        folder = hierarchy / PARENT / container
        if folder.is_dir():
            yield folder


def _hierarchies() -> Iterator[Path]:
    if _MOUNT.is_dir():
        yield from (path for path in _MOUNT.iterdir() if path.is_dir() and path.name != PARENT)


def hierarchies() -> list[Path]:
    """Where groups can be made: the unified hierarchy, or each of the older ones."""
    if (_MOUNT / "cgroup.controllers").exists():
        return [_MOUNT]
    return sorted(path for path in _hierarchies() if (path / "cgroup.procs").exists())


def groups_beginning(prefix: str) -> list[Path]:
    """The folders of all groups of nagara's whose name begins so, in every hierarchy."""
    places = (hierarchy / PARENT for hierarchy in (_MOUNT, *_hierarchies()))
    return sorted(path for place in places for path in place.glob(f"{prefix}*") if path.is_dir())


def kill_cgroup(container: str) -> int:
    """SIGKILLs whatever is left in the container's groups; returns how many that were."""
    pids = {pid for folder in cgroup_folders(container) for pid in _members(folder)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _members(folder: Path) -> set[int]:
    """Of the group and of those inside it."""
    found: set[int] = set()
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):  # removed meanwhile
            found.update(map(int, Path(inner, "cgroup.procs").read_text().split()))
    return found


def end_cgroup(container: str) -> None:
    """Ends whatever lives in the container's groups and removes them. Blocking.

    Raises OSError (EBUSY) when something in them resists SIGKILL.
    """
    deadline_s = time.monotonic() + _END_S
    while kill_cgroup(container):
        thaw_cgroup(container)
        if time.monotonic() > deadline_s:
            raise OSError(errno.EBUSY, "processes do not end", f"{PARENT}/{container}")
        time.sleep(_REMOVE_PAUSE_S)
    remove_cgroup(container)


def thaw_cgroup(container: str) -> None:
    """Lets frozen processes go on: a signal, SIGKILL too, only reaches them then."""
    for folder in cgroup_folders(container):
        for switch, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if (folder / switch).exists():
                with contextlib.suppress(OSError):  # being removed
                    (folder / switch).write_text(running)


def remove_cgroup(container: str) -> None:
    """Removes the container's groups, once the kernel has let go of the last process in them.

    Blocking, for a moment. Groups with processes are left.
    """
    for _ in range(_REMOVE_TRIES):
        for folder in list(cgroup_folders(container)):
            for inner, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):  # EBUSY
                    Path(inner).rmdir()
        if not any(cgroup_folders(container)):
            return
        time.sleep(_REMOVE_PAUSE_S)
