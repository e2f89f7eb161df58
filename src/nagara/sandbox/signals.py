"""Whether a process would notice a signal, read from /proc. See proc(5)."""

from pathlib import Path


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal.

    The first process of a pid namespace gets only the signals that it handles: without a
    handler, waiting for it to end of a SIGTERM is waiting for nothing.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # ended already
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
