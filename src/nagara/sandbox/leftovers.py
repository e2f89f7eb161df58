"""Processes that outlived whoever started them, found by evidence in /proc. See proc(5).

Tools that work for one replica (the OCI runtime, the checkpoint tool, the layer's writer) are
started with a working folder of that replica's and without a terminal; a process of the machine
of which both is true is such a tool, and not a person looking around there. Blocking: some
milliseconds for some hundred processes.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def tools_in(folder: Path) -> list[int]:
    """Tools working in or below `folder`, by pid."""
    place = folder.resolve()
    return [pid for pid in _pids() if _works_in(pid, place)]


def kill_tools_in(folder: Path) -> int:
    """SIGKILLs tools working in or below `folder`; returns how many there were."""
    found = tools_in(folder)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def kill_session(leader: int, started: str) -> int:
    """SIGKILLs what is left of a session; returns how many processes there were.

    Args:
        leader: pid of the process that began the session.
        started: its `start_mark`: another process may have been given the pid since.
    """
    found = [
        pid
        for pid in _pids()
        if (fields := _stat(pid)) and int(fields[3]) == leader and fields[0] != "Z"
    ]
    if leader in found and start_mark(leader) != started:
        return 0  # a pid is given away only when no session of that number is left
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def start_mark(pid: int) -> str | None:
    """When the process began, in clock ticks since boot: with the pid, names it for good."""
    fields = _stat(pid)
    return fields[19] if fields else None


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            yield int(entry.name)


def _works_in(pid: int, folder: Path) -> bool:
    try:
        is_there = (_PROC / str(pid) / "cwd").readlink().is_relative_to(folder)
    except OSError:  # ended, or a kernel thread
        return False
    return is_there and _stat(pid)[4:5] == ["0"]


def _stat(pid: int) -> list[str]:
    """The fields after the command's name: state, parent, group, session, terminal, ..."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
