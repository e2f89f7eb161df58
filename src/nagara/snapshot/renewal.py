"""Speaking to the hooks of a replica from outside. Blocking: worker threads only."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nagara.sandbox.unix_socket import connect
from nagara.snapshot.errors import SnapshotError

HOOK_SOCKET = Path("/run/nagara/hook.sock")  # inside the container; each process adds its pid


def call_hook(pid: int, request: Mapping[str, object], *, timeout_s: float) -> bool:
    """Asks all processes with hooks of the replica whose first process is `pid`.

    False when there are none.

    Raises:
        SnapshotError: a hook failed or did not answer in time.
    """
    folder = Path(f"/proc/{pid}/root") / HOOK_SOCKET.parent.relative_to("/")
    sockets = sorted(folder.glob(f"{HOOK_SOCKET.name}.*"))
    if not sockets:
        return False
    # All at once: what the hooks do may need all processes, as building a process group does.
    with ThreadPoolExecutor(len(sockets)) as pool:
        asked = [pool.submit(_ask, path, request, timeout_s) for path in sockets]
        have_hooks = [answer.result() for answer in asked]
    return any(have_hooks)


def _ask(path: Path, request: Mapping[str, object], timeout_s: float) -> bool:
    what = request["do"]
    try:
        with connect(path, timeout_s=timeout_s) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
                # Until the app has closed its end too: a connection to the outside that is still
                # open cannot be saved.
                answers.read()
    except ConnectionRefusedError:  # left behind by a process that has ended
        return False
    except OSError as error:
        raise SnapshotError(f"the hook {what} did not answer: {error}") from error
    try:
        answer = json.loads(line)
        has_worked, reason = answer["ok"], answer.get("error", "it gives no reason")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"the hook {what} answered {line[:80]!r}") from error
    if not has_worked:
        raise SnapshotError(f"the hook {what} failed: {reason}")
    return True
