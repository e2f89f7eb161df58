"""How many TCP connections are open in a process's network namespace, read from /proc/net/tcp."""

from pathlib import Path

# Codes of the kernel's tcp_states.h whose sockets still belong to a process.
_ESTABLISHED, _CLOSE_WAIT = "01", "08"


def open_connections(pid: int, port: int) -> int:
    """Connections at the server's `port` that are established or wait for its side to close.

    Not those of the replica's processes among themselves, which may stay for ever.
    """
    return sum(_open_in(Path(f"/proc/{pid}/net") / table, port) for table in ("tcp", "tcp6"))


def _open_in(table: Path, port: int) -> int:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:  # no IPv6, or the process has ended
        return 0
    fields = (line.split() for line in lines)
    return sum(
        state in (_ESTABLISHED, _CLOSE_WAIT) and int(local.rpartition(":")[2], 16) == port
        for _, local, _, state, *_ in fields
    )
