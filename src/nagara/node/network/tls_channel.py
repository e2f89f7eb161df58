"""A channel through TLS. Belongs to one event loop.

Python's own TLS sockets block, and asyncio's give up the connection with its first half: here the
library only turns bytes into other bytes. A peer that leaves without saying so has just left:
where that matters, frames say where the end is.
"""

import asyncio
import socket
import ssl

from nagara.node.network.channel import CHUNK_BYTES, close, receive, reset


class TlsChannel:
    """A channel over a connected, non-blocking socket. `handshake` comes first."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, is_server: bool
    ) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._received = bytearray()
        self._is_ended = False
        self._sending = asyncio.Lock()

    async def handshake(self) -> None:
        """Raises `ssl.SSLError`, having told the peer why."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed()
            except ssl.SSLError:
                await self._flush()
                raise
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        await self.readable()
        data = bytes(self._received)
        self._received.clear()
        return data

    async def read_line(self, limit: int) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if not await self._more() or len(self._received) > limit:
                return b""
        return self._take(end + 1)

    async def read_exactly(self, count: int) -> bytes:
        while len(self._received) < count and await self._more():
            pass
        return self._take(count)

    async def readable(self) -> None:
        if not self._received:
            await self._more()

    async def write(self, data: bytes) -> None:
        async with self._sending:
            self._tls.write(data)
            await self._send()

    async def end(self) -> None:
        raise NotImplementedError("half of a TLS connection is not ended: frames do that")

    def close(self) -> None:
        close(self._socket)

    def reset(self) -> None:
        reset(self._socket)

    def _take(self, count: int) -> bytes:
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    async def _more(self) -> bool:
        """Decrypts what comes next; False at the end."""
        while not self._is_ended:
            try:
                data = self._tls.read(CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self._feed()
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                data = b""
            if data:
                self._received += data
                return True
            self._is_ended = True
        return False

    async def _feed(self) -> None:
        data = await receive(self._socket, CHUNK_BYTES)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            await self._send()

    async def _send(self) -> None:
        if data := self._outgoing.read():
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
