"""Whether folders are as they were: one digest over what lstat says of everything in them.

Nothing is read. The change time covers contents, modes, owners and attributes alike; it cannot be
set by hand. Blocking: some microseconds a file.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_QUIET_S = 2.0


def tree_state(roots: Iterable[Path]) -> str | None:
    """Equal states, equal trees. None when something has just changed: a clock's step could hide
    that it does so again. Roots that do not exist count as such. Raises OSError."""
    digest = hashlib.sha256()
    newest_ns = 0
    for root in sorted(set(roots)):
        digest.update(b"\0\0" + os.fsencode(root))
        if not os.path.lexists(root):
            continue
        newest_ns = max(newest_ns, _note(digest, b"", os.lstat(root)))
        pending = [os.fsencode(root)] if root.is_dir() else []
        while pending:
            with os.scandir(pending.pop()) as folder:
                for entry in sorted(folder, key=lambda each: each.name):
                    state = entry.stat(follow_symlinks=False)
                    newest_ns = max(newest_ns, _note(digest, entry.path, state))
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    if time.time() - newest_ns / 1e9 < _QUIET_S:
        return None
    return f"tree:{digest.hexdigest()}"


def _note(digest: "hashlib._Hash", path: bytes, state: os.stat_result) -> int:
    """Adds one entry; returns when it last changed."""
    facts = (state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_ctime_ns)
    digest.update(b"%b\0%d %d %d %d %d\0" % (path, *facts))
    return state.st_ctime_ns
