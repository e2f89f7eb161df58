"""The Linux calls that Python 3.11's standard library lacks. Each raises OSError."""

import ctypes
import os
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, where: str = "") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), where)


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). `data` is the file system's own option string."""
    encoded = (os.fsencode(source), os.fsencode(target), kind.encode())
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(data)), str(target))


def unmount(target: Path, flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), str(target))


def unshare(flags: int) -> None:
    """unshare(2): affects the calling thread only."""
    _check(_libc.unshare(flags))


def setns(descriptor: int, kind: int) -> None:
    """setns(2): moves the calling thread into a namespace."""
    _check(_libc.setns(descriptor, kind))


def become_subreaper() -> None:
    """Orphaned descendants become children of this process."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def die_with_parent(number: int) -> None:
    """The kernel sends this process the signal when the thread that made it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0))
