"""Bytes to and from one peer, over a socket. Belongs to one event loop.

A channel is read by one task and written by one task at a time. Nothing that has arrived is lost
when a read is cancelled, and a line is read without what follows it: afterwards the socket may go
to somebody else.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from typing import Protocol

CHUNK_BYTES = 128 * 1024
KEEP_IDLE_S, KEEP_EVERY_S, KEEP_COUNT = 3, 2, 4  # a silent peer is asked whether it is there
SILENT_S = 10.0  # without a sign of the peer for so long, its connection is given up

_ACCEPT_PAUSE_S = 0.1
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger
_FINISH_AT_CLOSE = struct.pack("ii", 0, 0)

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """Bytes both ways. Methods raise OSError when the connection breaks."""

    async def read(self) -> bytes:
        """Some bytes; empty when the peer has ended its side."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when the connection has taken all of it."""
        ...

    async def end(self) -> None:
        """No more will be written; reading goes on."""
        ...

    def close(self) -> None:
        """What was written still arrives."""
        ...

    def reset(self) -> None:
        """The peer sees a broken connection, not an end."""
        ...


class Channel(Stream, Protocol):
    """A stream on which lines are exchanged first."""

    async def read_line(self, limit: int) -> bytes:
        """Up to and with the first newline; empty when the peer left before, or above `limit`."""
        ...

    async def read_exactly(self, count: int) -> bytes:
        """So many bytes; fewer when the peer left before."""
        ...

    async def readable(self) -> None:
        """Returns when there is something to read, or the end; takes nothing."""
        ...


class SocketChannel:
    """A channel that is a non-blocking stream socket.

    Attributes:
        socket: whoever takes it from here does not use the channel any more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    async def read(self) -> bytes:
        return await self._receive(CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    async def read_line(self, limit: int) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            seen = await self._receive(65536, socket.MSG_PEEK)
            taken = self.socket.recv(seen.find(b"\n") + 1 or len(seen))
            if not taken or len(line) > limit:
                return b""
            line += taken
        return bytes(line)

    async def read_exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count and (data := await self._receive(count - len(received))):
            received += data
        return bytes(received)

    async def readable(self) -> None:
        await until_readable(self.socket)

    async def _receive(self, count: int, flags: int = 0) -> bytes:
        return await receive(self.socket, count, flags)

    def close(self) -> None:
        close(self.socket)

    def reset(self) -> None:
        reset(self.socket)


async def accepted(server: socket.socket) -> socket.socket:
    """The next connection."""
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(server))[0]
        except OSError as error:  # most likely no descriptor is left
            _log.error("a connection to the agent cannot be accepted: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)


async def receive(connection: socket.socket, count: int, flags: int = 0) -> bytes:
    """Up to `count` bytes. Unlike `loop.sock_recv`, cancelled, it has taken none."""
    while True:
        try:
            return connection.recv(count, flags)
        except BlockingIOError:
            await until_readable(connection)


async def until_readable(connection: socket.socket) -> None:
    """Returns when a read would not wait."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def tell() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, tell)
    try:
        await readable
    finally:
        loop.remove_reader(connection)


def close(connection: socket.socket) -> None:
    """Closes it; what was written still arrives, also of a connection of `hold`."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FINISH_AT_CLOSE)
    connection.close()


def reset(connection: socket.socket) -> None:
    """Closes it so that the peer gets an error instead of an end."""
    hold(connection)
    connection.close()


def hold(connection: socket.socket) -> None:
    """If this process is killed the peer gets an error: a cut answer is not taken as whole."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)


def watch_peer(connection: socket.socket) -> None:
    """Sends at once, and gives the TCP connection up when the peer's machine has gone silent."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEP_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEP_EVERY_S),
        (socket.TCP_KEEPCNT, KEEP_COUNT),
        (socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
