"""Named moments at which a process can be made to fail, to see that nothing tears.

Off unless `NAGARA_FAULT_FILE` names a file. While that file holds `ACTION POINT`, the first
process that reaches POINT removes it and then either kills itself (`kill`), as a crash or the
kernel would, or finds the disk full (`full`). Points stand where something has just been made
outside the process, or has just been undone.
"""

import errno
import os
import signal
from pathlib import Path

VARIABLE = "NAGARA_FAULT_FILE"

# In the order in which they are reached.
POINTS: dict[str, tuple[str, ...]] = {
    "start": ("folder", "recorded"),  # around both ways of starting
    "launch": ("upper", "mounted", "bundle", "running", "ready"),
    "restore": (
        *("verified", "image", "layer", "mounted", "bundle", "running", "device"),
        *("named", "renewed", "answered"),
    ),
    "fallback": ("counted", "cleared", "emptied"),  # a restore that has failed
    "capture": (
        *("staging", "folder", "prepared", "device", "paused", "listed", "memory", "layer"),
        *("removed", "named", "noted", "stored", "published", "replaced"),
    ),
    "stop": ("asked", "gone"),
    "clear": (
        *("ended", "unmounted", "deleted", "rootless", "released", "groupless"),
        "forgotten",
    ),
    "keeper": ("asked", "spawned", "launched", "ended", "forgotten"),  # in the keeper's process
}


def reach(point: str) -> None:
    """Called at the moment `GROUP.NAME`, one of `POINTS`. Costs a look at the environment.

    Raises:
        OSError: ENOSPC, where a test has asked for it.
    """
    armed = os.environ.get(VARIABLE)
    if not armed:
        return
    try:
        action, name = Path(armed).read_text().split()
        if name != point:
            return
        Path(armed).unlink()
    except FileNotFoundError:  # nothing is wanted, or it has just happened elsewhere
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
