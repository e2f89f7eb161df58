"""Network namespaces: one per replica, so that clones keep equal addresses and ports.

A namespace is held by a descriptor of this process until a replica's first process is inside;
from then on that process keeps it alive. Nothing is mounted, so nothing can be left behind.

`open_socket`, `open_netlink` and `create` change the namespace of the calling *thread* for some
microseconds. They contain no await and no fork, and end the process if the way back fails: going
on in a foreign namespace would send traffic to the wrong replica.
"""

import fcntl
import os
import socket
import struct
from pathlib import Path

from nagara.base.linux import CLONE_NEWNET, setns, unshare
from nagara.sandbox.netlink import Netlink

_OWN_NAMESPACE = Path("/proc/thread-self/ns/net")
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


class NetworkNamespace:
    """A network namespace with its loopback interface up, held open by a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls) -> "NetworkNamespace":
        """A new, empty namespace. Needs root (EPERM otherwise)."""
        home = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            unshare(CLONE_NEWNET)
            try:
                descriptor = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
                _bring_loopback_up()
            finally:
                _return_to(home)
        finally:
            os.close(home)
        return cls(descriptor)

    @classmethod
    def of_process(cls, pid: int) -> "NetworkNamespace":
        """The namespace that a running process is in. Needs root."""
        return cls(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    @property
    def path(self) -> Path:
        """A path that names the namespace for as long as this object is open."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    @property
    def descriptor(self) -> int:
        """The descriptor that holds it."""
        return self._descriptor

    def open_socket(self) -> socket.socket:
        """An unconnected, non-blocking TCP socket that lives inside the namespace."""
        return self._socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def open_netlink(self) -> Netlink:
        """What the namespace's links and routes are set up by."""
        return Netlink(self._socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))

    def _socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        home = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(self._descriptor, CLONE_NEWNET)
            try:
                inside = socket.socket(family, kind, protocol)
            finally:
                _return_to(home)
        finally:
            os.close(home)
        return inside

    def close(self) -> None:
        """Gives up this process's hold. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _return_to(home: int) -> None:
    try:
        setns(home, CLONE_NEWNET)
    except OSError:
        os.abort()


def _bring_loopback_up() -> None:
    request = struct.pack("16sH14x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
