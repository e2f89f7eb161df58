"""The control groups of a container: who is left in them, and taking them away. Needs root.

Works for the unified hierarchy and for the older one with a tree per controller.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
PARENT = "nagara"
_NO_LIMIT = 1 << 60  # the older kind writes a number beyond all memory
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


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What a container has used; None: it is not bounded."""

    cpu_s: float
    cores: float | None
    memory_bytes: int  # without file content that is cached and not in active use
    memory_limit_bytes: int | None


def read_usage(container: str) -> GroupUsage:
    """Of both kinds of hierarchies. Raises OSError or ValueError where it cannot be read."""
    folders = list(cgroup_folders(container))
    stat = _words(_found(folders, "memory.stat"))
    if (current := _find(folders, "memory.current")) is not None:
        quota, period = _found(folders, "cpu.max").split()
        limit = _found(folders, "memory.max").strip()
        return GroupUsage(
            int(_words(_found(folders, "cpu.stat"))["usage_usec"]) / 1e6,
            None if quota == "max" else int(quota) / int(period),
            int(current) - stat.get("inactive_file", 0),
            None if limit == "max" else int(limit),
        )
    used, most = (_found(folders, f"memory.{name}_in_bytes") for name in ("usage", "limit"))
    quota, period = (_found(folders, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return GroupUsage(
        int(_found(folders, "cpuacct.usage")) / 1e9,
        None if int(quota) < 0 else int(quota) / int(period),
        int(used) - stat.get("total_inactive_file", 0),
        None if int(most) >= _NO_LIMIT else int(most),
    )


def _find(folders: list[Path], name: str) -> str | None:
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            return (folder / name).read_text()
    return None


def _found(folders: list[Path], name: str) -> str:
    if (text := _find(folders, name)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return text


def _words(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}


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
