"""A machine's network in namespaces of the tests' own: nothing of this machine's is touched.

machine    up0, 203.0.113.1 ── eth0, 203.0.113.9    outside: a web server and a name server
"""

import contextlib
import json
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nagara.base.linux import CLONE_NEWNET, setns
from nagara.sandbox.netns import NetworkNamespace

MACHINE, OUTSIDE, NAME = "203.0.113.1", "203.0.113.9", "outside.test"
_MAC, _MAC_OUTSIDE = bytes.fromhex("02aabbcc0001"), bytes.fromhex("02aabbcc0002")


class NetworkLab:
    """The two namespaces. `callers` are the addresses that the servers outside were asked from."""

    def __init__(self) -> None:
        self.machine, self._outside = NetworkNamespace.create(), NetworkNamespace.create()
        self.callers: list[tuple[str, int]] = []
        self._thread = ThreadPoolExecutor(1, "machine")
        self.here(setns, self.machine.descriptor, CLONE_NEWNET)
        self.forward(True)
        with self.machine.open_netlink() as near, self._outside.open_netlink() as far:
            near.add_pair("up0", _MAC, 1400, "eth0", _MAC_OUTSIDE, self._outside.descriptor)
            for side, link, own, other, mac in (
                (near, "up0", MACHINE, OUTSIDE, _MAC_OUTSIDE),
                (far, "eth0", OUTSIDE, MACHINE, _MAC),
            ):
                index = side.link_names()[link]
                side.add_address(index, own)
                side.add_neighbour(index, other, mac)
                side.set_up(index)
                side.add_route(index, other, to=other)
        self._servers = [self._serve(self._web, 80), self._serve(self._names, 53, is_udp=True)]

    def here(self, act: Any, *arguments: Any) -> Any:
        """Calls something on a thread that is in the machine's namespace."""
        return self._thread.submit(act, *arguments).result()

    def forward(self, is_on: bool) -> None:
        """Whether the machine passes packets on."""
        self.here(Path("/proc/sys/net/ipv4/ip_forward").write_text, "1" if is_on else "0")

    def links(self) -> list[str]:
        """The machine's devices that belong to replicas."""
        with self.machine.open_netlink() as near:
            return [name for name in near.link_names() if name.startswith("nagara")]

    def left(self) -> list[str]:
        """What is there of them when the kernel, which ends namespaces at leisure, has had time."""
        for _ in range(2000):
            if not self.links():
                break
            time.sleep(0.01)
        return self.links()

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """A program in the machine's namespace."""
        return subprocess.Popen(["nsenter", f"--net={self.machine.path}", *command])

    def close(self) -> None:
        """Ends the servers; the namespaces go with their last user."""
        for server in self._servers:
            server.shutdown(socket.SHUT_RDWR) if server.type == socket.SOCK_STREAM else None
            server.close()
        self._thread.shutdown()
        self.machine.close()
        self._outside.close()

    def _serve(self, act: Any, port: int, *, is_udp: bool = False) -> socket.socket:
        kind = socket.SOCK_DGRAM if is_udp else socket.SOCK_STREAM
        server = self._outside._socket(socket.AF_INET, kind)
        server.bind((OUTSIDE, port))
        threading.Thread(target=act, args=(server,), daemon=True).start()
        return server

    def _web(self, server: socket.socket) -> None:
        """Says whom it sees, after what it was told; a large answer, so that sizes matter."""
        server.listen()
        while True:
            try:
                caller, address = server.accept()
            except OSError:
                return
            self.callers.append(address)
            threading.Thread(target=_answer, args=(caller, address), daemon=True).start()

    def _names(self, server: socket.socket) -> None:
        """A name server that knows one name."""
        while True:
            try:
                asked, address = server.recvfrom(4096)
            except OSError:
                return
            self.callers.append(address)
            end = asked.index(b"\0", 12) + 5
            is_known = _name(asked[12:end]) == NAME and asked[end - 4 : end - 2] == b"\0\1"
            flags, answers = (0x8580, 1) if is_known else (0x8583, 0)
            reply = asked[:2] + struct.pack(">HHHHH", flags, 1, answers, 0, 0) + asked[12:end]
            if is_known:
                reply += struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + socket.inet_aton(OUTSIDE)
            server.sendto(reply, address)


def _name(labels: bytes) -> str:
    at, found = 0, []
    while labels[at]:
        found.append(labels[at + 1 : at + 1 + labels[at]].decode())
        at += 1 + labels[at]
    return ".".join(found)


def _answer(caller: socket.socket, address: tuple[str, int]) -> None:
    with caller, contextlib.suppress(OSError):
        while said := caller.recv(65536):
            caller.sendall(json.dumps([*address, len(said)]).encode() + b" " * 100_000 + b"\n")
