"""Giving a running container its own host name: a restored one wakes up with the captured one's."""

import os
import socket

from nagara.base.linux import CLONE_NEWUTS, setns


def set_hostname(pid: int, name: str) -> None:
    """Sets the host name in the UTS namespace of process `pid`. Needs root.

    Changes the calling thread's namespace for some microseconds and ends the process if the way
    back fails, as `netns` does.
    """
    home = os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    target = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(target, CLONE_NEWUTS)
        try:
            socket.sethostname(name[:63])
        finally:
            try:
                setns(home, CLONE_NEWUTS)
            except OSError:
                os.abort()
    finally:
        os.close(target)
        os.close(home)
