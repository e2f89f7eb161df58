"""Bytes carried between two streams, both ways, until both have ended.

    gateway ◀──▶ agent ◀──▶ replica          plain: the bytes as they are, FIN and RST as they are
    gateway ◀─▶ pump ◀─frames─▶ agent ◀──▶ replica      TLS: a frame is 4 bytes of length, then it;
                                                        one of length 0 ends its direction

A stream is read only when the other has taken what came before, so a slow reader slows down the
writer and no memory grows. An end of one direction is passed on as such; whatever breaks, breaks
both, so that an answer that was cut short is never taken as whole.
"""

import asyncio
import logging
import socket
import struct

from nagara.node.network.channel import CHUNK_BYTES, Channel, Stream

_LENGTH = struct.Struct(">I")

_log = logging.getLogger(__name__)


class Framed:
    """A stream inside a channel that cannot end one direction by itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._left = 0  # of the present frame

    async def read(self) -> bytes:
        if not self._left:
            header = await self._channel.read_exactly(_LENGTH.size)
            if len(header) < _LENGTH.size:
                raise ConnectionResetError("the connection was cut off")
            (self._left,) = _LENGTH.unpack(header)
            if not self._left:
                return b""
        data = await self._channel.read_exactly(min(self._left, CHUNK_BYTES))
        if not data:
            raise ConnectionResetError("the connection was cut off in a frame")
        self._left -= len(data)
        return data

    async def write(self, data: bytes) -> None:
        await self._channel.write(_LENGTH.pack(len(data)) + data)

    async def end(self) -> None:
        await self._channel.write(_LENGTH.pack(0))

    def close(self) -> None:
        self._channel.close()

    def reset(self) -> None:
        self._channel.reset()


async def forward(one: Stream, other: Stream) -> None:
    """Returns when both directions have ended or something broke; the streams are closed then."""
    is_whole = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry(one, other))
            group.create_task(_carry(other, one))
        is_whole = True
    except* OSError as broken:
        _log.debug("a forwarded connection broke: %s", broken.exceptions[0])
    finally:
        for stream in (one, other):
            if is_whole:
                stream.close()
            else:
                stream.reset()


async def _carry(source: Stream, target: Stream) -> None:
    while data := await source.read():
        await target.write(data)
    await target.end()


def local_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected, non-blocking sockets of this process.

    TCP, since of a Unix socket's pair neither can make the other see an error instead of an end.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        one = socket.create_connection(server.getsockname())
        try:
            while True:
                other, peer = server.accept()
                if peer == one.getsockname():
                    break
                other.close()  # somebody else of this machine was quicker
        except BaseException:
            one.close()
            raise
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other
