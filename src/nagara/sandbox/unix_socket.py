"""Unix sockets whose peers are known, at paths of any length.

Whoever may connect may order containers made as root, so a connection is accepted only from
users on a list, whatever the file's mode says.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """A name for `path` that fits the 108 bytes of sockaddr_un."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path, *, owner: int | None = None) -> socket.socket:
    """A listening stream socket at `path`, replacing a dead one; mode 0600.

    Args:
        owner: user id that shall own the socket file; None leaves it.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    with _short_path(path) as short:
        server.bind(short)
    path.chmod(0o600)
    if owner is not None:
        os.chown(path, owner, -1)
    server.listen(128)
    return server


def connect(path: Path, *, timeout_s: float | None = None) -> socket.socket:
    """A connected stream socket. Raises FileNotFoundError or ConnectionRefusedError."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _short_path(path) as short:
            client.connect(short)
    except BaseException:
        client.close()
        raise
    return client


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel recorded it at connect."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)
