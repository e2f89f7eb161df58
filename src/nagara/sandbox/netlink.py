"""Links, addresses, neighbours and routes of a network namespace, by rtnetlink. See rtnetlink(7).

Only what a pair of virtual Ethernet devices needs. A call takes some ten microseconds and blocks;
a socket belongs to the namespace it was made in, whatever thread uses it.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator

# Message types and flags: linux/rtnetlink.h, linux/netlink.h.
_NEWLINK, _GETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 18, 20, 24, 28
_REQUEST, _ACK, _DUMP, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x300, 0x200, 0x400
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, device type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
# Attributes of links (linux/if_link.h), of addresses, routes and neighbours.
_LINK_ADDRESS, _LINK_NAME, _LINK_MTU, _LINK_INFO, _LINK_NAMESPACE = 1, 3, 4, 18, 28
_INFO_KIND, _INFO_DATA, _PEER = 1, 2, 1
_LOCAL = 2
_DESTINATION, _OUT, _GATEWAY, _PREFERRED_SOURCE = 1, 4, 5, 7
_NEIGHBOUR_ADDRESS, _LINK_LAYER_ADDRESS = 1, 2
_NESTED = 0x8000
_IS_UP, _PERMANENT, _ON_LINK = 1, 0x80, 4
_MAIN_TABLE, _STATIC, _UNICAST = 254, 4, 1
_REPLY_BYTES = 1 << 16


class Netlink:
    """A netlink socket. Every method raises OSError with the kernel's reason.

    Args:
        opened: an AF_NETLINK socket of the namespace meant; closed with this.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._sequence = 0

    @classmethod
    def here(cls) -> "Netlink":
        """One of the calling thread's namespace."""
        return cls(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> "Netlink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def link_names(self) -> dict[str, int]:
        """All links by name, with their indices."""
        found = {}
        for body in self._ask(_GETLINK, _DUMP, _LINK.pack(0, 0, 0, 0, 0)):
            index = _LINK.unpack_from(body)[2]
            for kind, value in _attributes(body[_LINK.size :]):
                if kind == _LINK_NAME:
                    found[value.rstrip(b"\0").decode()] = index
        return found

    def add_pair(
        self, name: str, mac: bytes, mtu: int, peer: str, peer_mac: bytes, namespace: int
    ) -> None:
        """A pair of virtual Ethernet devices: `name` here, `peer` in the namespace behind a
        descriptor. Raises FileExistsError when a link here has the name."""
        inner = _LINK.pack(0, 0, 0, 0, 0) + b"".join((
            _attribute(_LINK_NAME, peer.encode() + b"\0"),
            _attribute(_LINK_ADDRESS, peer_mac),
            _attribute(_LINK_MTU, struct.pack("=I", mtu)),
            _attribute(_LINK_NAMESPACE, struct.pack("=I", namespace)),
        ))  # fmt: skip
        info = _attribute(_INFO_KIND, b"veth\0") + _attribute(
            _INFO_DATA | _NESTED, _attribute(_PEER | _NESTED, inner)
        )
        self._change(
            _NEWLINK,
            _LINK.pack(0, 0, 0, 0, 0),
            _attribute(_LINK_NAME, name.encode() + b"\0"),
            _attribute(_LINK_ADDRESS, mac),
            _attribute(_LINK_MTU, struct.pack("=I", mtu)),
            _attribute(_LINK_INFO | _NESTED, info),
        )

    def set_up(self, index: int) -> None:
        """Brings a link up."""
        self._change(_NEWLINK, _LINK.pack(0, 0, index, _IS_UP, _IS_UP), create=False)

    def add_address(self, index: int, address: str) -> None:
        """Gives a link an IPv4 address of its own, without a network around it."""
        packed = socket.inet_aton(address)
        self._change(
            _NEWADDR, _ADDRESS.pack(socket.AF_INET, 32, 0, 0, index), _attribute(_LOCAL, packed)
        )

    def add_neighbour(self, index: int, address: str, mac: bytes) -> None:
        """Says for good which device has an IPv4 address, so that nobody need ask."""
        self._change(
            _NEWNEIGH,
            _NEIGHBOUR.pack(socket.AF_INET, index, _PERMANENT, 0, 0),
            _attribute(_NEIGHBOUR_ADDRESS, socket.inet_aton(address)),
            _attribute(_LINK_LAYER_ADDRESS, mac),
        )

    def add_route(
        self, index: int, gateway: str, *, to: str | None = None, source: str | None = None
    ) -> None:
        """Sends packets to one address (None: to all others) through a link to a gateway.

        Raises FileExistsError when there is such a route.
        """
        body = _ROUTE.pack(
            *(socket.AF_INET, 32 if to else 0, 0, 0),
            *(_MAIN_TABLE, _STATIC, 0, _UNICAST, _ON_LINK),
        )
        parts = [
            _attribute(_OUT, struct.pack("=I", index)),
            _attribute(_GATEWAY, socket.inet_aton(gateway)),
        ]
        if to is not None:
            parts.append(_attribute(_DESTINATION, socket.inet_aton(to)))
        if source is not None:
            parts.append(_attribute(_PREFERRED_SOURCE, socket.inet_aton(source)))
        self._change(_NEWROUTE, body, *parts)

    def _change(self, kind: int, *parts: bytes, create: bool = True) -> None:
        flags = _ACK | (_CREATE | _EXCLUSIVE if create else 0)
        for _ in self._ask(kind, flags, b"".join(parts)):
            pass

    def _ask(self, kind: int, flags: int, body: bytes) -> Iterator[bytes]:
        """The bodies of what is answered, until the kernel says that it is done."""
        self._sequence += 1
        length = _HEADER.size + len(body)
        header = _HEADER.pack(length, kind, _REQUEST | flags, self._sequence, 0)
        self._socket.sendto(header + body, (0, 0))
        while True:
            reply = self._socket.recv(_REPLY_BYTES)
            at = 0
            while at < len(reply):
                size, answered, _, sequence, _ = _HEADER.unpack_from(reply, at)
                inside = reply[at + _HEADER.size : at + size]
                at += -(-size // 4) * 4
                if sequence != self._sequence:
                    continue
                if answered == _ERROR:
                    number = -struct.unpack_from("=i", inside)[0]
                    if number:
                        raise OSError(number, os.strerror(number))
                    return
                if answered == _DONE:
                    return
                yield inside


def _attribute(kind: int, value: bytes) -> bytes:
    """One attribute, filled up to whole words."""
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            raise OSError(errno.EBADMSG, "an attribute without a length")
        yield kind & ~_NESTED, data[at + 4 : at + length]
        at += -(-length // 4) * 4
