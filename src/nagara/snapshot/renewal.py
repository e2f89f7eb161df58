"""Speaking to the hooks of a replica from outside. Blocking: worker threads only.

The other side is an app's: no link that it lays is followed out of its tree, and however much or
slowly it answers, the time limit and the memory stay what they are.
"""

import json
import os
import socket
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from nagara.snapshot.errors import SnapshotError

HOOK_SOCKET = Path("/run/nagara/hook.sock")  # inside the container; each process adds its pid
_PROCESSES = 1024  # with hooks, of one replica
_ANSWER_BYTES = 1 << 16


def call_hook(pid: int, request: Mapping[str, object], *, timeout_s: float) -> bool:
    """Asks all processes with hooks of the replica whose first process is `pid`.

    False when there are none.

    Raises:
        SnapshotError: a hook failed or did not answer in time.
    """
    with ExitStack() as opened:
        sockets = _sockets(Path(f"/proc/{pid}/root"), opened)
        if not sockets:
            return False
        # All at once: what the hooks do may need all processes, as building a group does.
        with ThreadPoolExecutor(len(sockets)) as pool:
            asked = [pool.submit(_ask, place, request, timeout_s) for place in sockets]
            have_hooks = [answer.result() for answer in asked]
    return any(have_hooks)


def _sockets(root: Path, opened: ExitStack) -> list[int]:
    """Descriptors of the sockets themselves, below a root whose links are not followed."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, folder)
    try:
        for part in HOOK_SOCKET.parent.parts[1:]:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=folder)
            opened.callback(os.close, folder)
    except OSError:  # it has none, or has put something else in its place
        return []
    listed = os.listdir(folder)  # noqa: PTH208 - of a descriptor
    names = [name for name in listed if name.startswith(f"{HOOK_SOCKET.name}.")]
    if len(names) > _PROCESSES:
        raise SnapshotError(f"{len(names)} processes have hooks, more than {_PROCESSES}")
    found = []
    for name in sorted(names):
        try:
            place = os.open(name, os.O_PATH | flags, dir_fd=folder)
        except FileNotFoundError:  # its process has ended
            continue
        opened.callback(os.close, place)
        if stat.S_ISSOCK(os.fstat(place).st_mode):
            found.append(place)
    return found


def _ask(place: int, request: Mapping[str, object], timeout_s: float) -> bool:
    what = request["do"]
    end_s = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"/proc/self/fd/{place}")
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _answer(connection, end_s)
    except (ConnectionRefusedError, FileNotFoundError):  # left behind by an ended process
        return False
    except OSError as error:
        raise SnapshotError(f"the hook {what} did not answer: {error}") from error
    try:
        answer = json.loads(line)
        has_worked, reason = answer["ok"], answer.get("error", "it gives no reason")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"the hook {what} answered {line[:80]!r}") from error
    if not has_worked:
        raise SnapshotError(f"the hook {what} failed: {reason}")
    return True


def _answer(connection: socket.socket, end_s: float) -> bytes:
    """The first line, once the app has closed its end: an open connection cannot be saved."""
    answer = b""
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        piece = connection.recv(_ANSWER_BYTES)
        if not piece:
            return answer.partition(b"\n")[0]
        answer += piece
        if len(answer) > _ANSWER_BYTES:
            raise OSError(f"it says more than {_ANSWER_BYTES} bytes")
