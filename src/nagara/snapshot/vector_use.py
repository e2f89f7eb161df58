"""Which processes have used AVX-512, as the kernel has seen it. Blocking: worker threads only.

`/proc/PID/task/TID/arch_status` says how long ago a thread was last scheduled away with AVX-512
registers in use; -1 if it never was. The file is there on CPUs with AVX-512 alone. A container's
first thread keeps the answer of the program that it was before, the container runtime, so what it
says right after it has become the app's is to be held against what it says later.
"""

import re
import time
from collections.abc import Iterable
from pathlib import Path

_ELAPSED = re.compile(r"^AVX512_elapsed_ms:\s*(-?\d+)$", re.MULTILINE)
_SLACK_S = 0.05  # the kernel counts in its own ticks
_RUNTIME_NAME = "runc:"
_EXECUTED_S, _PAUSE_S = 10.0, 0.002
_NEVER = float("-inf")


def last_use_s(pid: int, thread: int) -> tuple[float, float]:
    """When a thread was last seen using it: between two readings of the monotonic clock, for this
    process may be held up between asking and looking at the clock. Minus infinity: it never was.
    """
    asked_s = time.monotonic()
    found = _ELAPSED.search(_text(Path(f"/proc/{pid}/task/{thread}/arch_status")))
    answered_s = time.monotonic()
    elapsed_s = int(found[1]) / 1000 if found else -1.0
    if elapsed_s < 0:
        return _NEVER, _NEVER
    return asked_s - elapsed_s, answered_s - elapsed_s


def use_before_the_app(pid: int) -> float:
    """The last use by what a container's first thread was before it became the app's."""
    deadline_s = time.monotonic() + _EXECUTED_S
    while _text(Path(f"/proc/{pid}/comm")).startswith(_RUNTIME_NAME):
        if time.monotonic() > deadline_s:
            break
        time.sleep(_PAUSE_S)
    return last_use_s(pid, pid)[1]


def users_of_avx512(pids: Iterable[int], first: int, before_s: float) -> list[str]:
    """The names of processes that have used it, with their pids.

    Args:
        first: the container's first process.
        before_s: what `use_before_the_app` said of that one.
    """
    return [
        f"{_text(Path(f'/proc/{pid}/comm')).strip()} ({pid})"
        for pid in pids
        if _has_used(pid, before_s if pid == first else _NEVER)
    ]


def _has_used(pid: int, before_s: float) -> bool:
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        thread = int(folder.name)
        since_s = before_s if thread == pid else _NEVER
        if last_use_s(pid, thread)[0] > since_s + _SLACK_S:
            return True
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended, or this kernel does not tell
        return ""
