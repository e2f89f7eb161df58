"""How many TCP connections are open in a process's network namespace, read from /proc/net/tcp."""

from pathlib import Path

# Codes of the kernel's tcp_states.h whose sockets still belong to a process.
_ESTABLISHED, _CLOSE_WAIT = "01", "08"


def open_connections(pid: int) -> int:
    """Connections that are established or wait for the local side to close."""
    return sum(_open_in(Path(f"/proc/{pid}/net") / table) for table in ("tcp", "tcp6"))


def _open_in(table: Path) -> int:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:  # no IPv6, or the process has ended
        return 0
    return sum(line.split()[3] in (_ESTABLISHED, _CLOSE_WAIT) for line in lines)
