"""What the checkpoint tool has found out about this kernel, where it cannot keep that itself.

CRIU tries the kernel out at each of its starts, with some programs and in some 25 ms, unless it
finds the outcome in `/run/criu.kdat`. It writes that file only where `/run` is a tmpfs, so that it
cannot outlive the kernel, and not while there is a `criu.kdat.tmp`, which one that was killed at
that moment leaves for good. So what is torn is removed, and where `/run` is on a disk each restore
gets a `/run` of its own in memory, with the file in it.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path

from nagara.base.linux import (
    CLONE_NEWNS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    unshare,
)

_RUN = Path("/run")
_NAME = "criu.kdat"
_TORN_S = 60.0
_LIMIT_S = 10.0
_FIND_OUT = 'mount -t tmpfs tmpfs "$1" && "$2" check >&2; cat "$1/$3"'


def keep_kernel_facts(criu: Path, file: Path) -> Path | None:
    """Writes what the tool finds out about this kernel to `file`. Blocking: some 0.1 s.

    Returns `file`, or None where the tool keeps it itself or it cannot be had.
    """
    clear_torn(_RUN)
    file.unlink(missing_ok=True)  # it may be of another kernel
    if _is_in_memory(_RUN) or is_below_run(criu) or is_below_run(file):
        return None
    apart = ["unshare", "--mount", "--propagation", "private"]
    find_out = ["sh", "-c", _FIND_OUT, "sh", str(_RUN), str(criu), _NAME]
    try:
        done = subprocess.run(
            [*apart, *find_out], capture_output=True, timeout=_LIMIT_S, check=False
        )
        if not done.stdout:
            return None
        file.write_bytes(done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return file


def is_below_run(path: Path) -> bool:
    """Whether a process with a `/run` of its own does not see it."""
    return path.resolve().is_relative_to(_RUN)


def clear_torn(run: Path) -> None:
    """Removes what a tool that was killed has left where it keeps its facts."""
    torn = run / f"{_NAME}.tmp"
    with contextlib.suppress(OSError):
        if time.time() - torn.stat().st_mtime > _TORN_S:
            torn.unlink()


def see_kernel_facts(file: Path) -> None:
    """Gives this process and those it starts a `/run` of their own with the facts in it.

    For a process that is about to run the tool. Raises OSError.
    """
    facts = file.read_bytes()
    unshare(CLONE_NEWNS)
    mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    mount("tmpfs", _RUN, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=700,size=1m")
    descriptor = os.open(_RUN / _NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, facts)
    finally:
        os.close(descriptor)


def _is_in_memory(folder: Path) -> bool:
    """Whether a tmpfs is mounted there."""
    kinds = [
        fields[fields.index("-") + 1]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if (fields := line.split())[4] == str(folder)
    ]
    return kinds[-1:] == ["tmpfs"]
