"""Whose is a socket that no table of a network namespace lists? Blocking, some microseconds each.

The tables hold bound, listening and connected sockets. One that was just made, or whose connection
has just ended, is in none of them although it is an ordinary socket of the replica; one that was
made outside, or of a kind like MPTCP, is in none either. So the socket itself is asked, through a
copy of its descriptor: see pidfd_getfd(2), SO_PROTOCOL in socket(7), SIOCGSKNS in linux/sockios.h.
"""

import ctypes
import errno
import fcntl
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # the same on all architectures
_SIOCGSKNS = 0x894C
_SO_PROTOCOL = 38
_LISTED_PROTOCOLS = (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE)
_libc = ctypes.CDLL(None, use_errno=True)


def own_unlisted(pids: Collection[int], inodes: Collection[int]) -> Iterator[int]:
    """Those of `inodes` that are ordinary sockets of the network namespace of the first pid.

    A socket that is gone by now is one too, and so is one that may not be asked: nothing is held
    against it.

    Args:
        pids: the processes that hold them.
    """
    if not inodes:
        return
    here = Path(f"/proc/{next(iter(pids))}/ns/net").stat().st_ino
    kinds: dict[int, bool] = {}
    for pid in pids:
        for number, inode in _sockets_of(pid):
            if inode in inodes and inode not in kinds:
                kinds[inode] = _is_ordinary(pid, number, here)
    yield from (inode for inode in inodes if kinds.get(inode, True))


def _sockets_of(pid: int) -> Iterator[tuple[int, int]]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names only
    except OSError:  # ended meanwhile
        return
    for number in numbers:
        try:
            target = str(Path(f"/proc/{pid}/fd/{number}").readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield int(number), int(target[8:-1])


def _is_ordinary(pid: int, number: int, namespace: int) -> bool:
    try:
        copy = socket.socket(fileno=_copied(pid, number))
    except OSError:  # closed meanwhile, or not ours to ask
        return True
    with copy:
        if copy.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL) not in _LISTED_PROTOCOLS:
            return copy.family not in (socket.AF_INET, socket.AF_INET6)
        try:
            its_own = fcntl.ioctl(copy, _SIOCGSKNS)
        except OSError as error:
            return error.errno in (errno.EPERM, errno.ENOTTY)
        try:
            return os.fstat(its_own).st_ino == namespace
        finally:
            os.close(its_own)


def _copied(pid: int, number: int) -> int:
    """A descriptor of this process for another's. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        copy = int(_libc.syscall(_PIDFD_GETFD, process, number, 0))
    finally:
        os.close(process)
    if copy < 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return copy
