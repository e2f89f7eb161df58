"""Agents on other machines as this process reaches them. Belongs to one event loop.

A connection that a call leaves as it was is kept for a few seconds for the next call to the same
agent: it has proven itself already. A call that must not be made twice never uses such a one,
for whether the agent was still there when it was written cannot be known.
"""

import asyncio
import os
import socket
import ssl
from collections import defaultdict
from types import TracebackType
from typing import Self

from nagara.base.errors import UsageError
from nagara.contract.node import NodeUnavailableError
from nagara.node.network.address import split_address
from nagara.node.network.channel import Channel, SocketChannel, watch_peer
from nagara.node.network.forwarding import Framed, forward, local_pair
from nagara.node.network.hello import HelloError, greet
from nagara.node.network.membership import Membership
from nagara.node.network.tls_channel import TlsChannel
from nagara.node.wire import MESSAGE_LIMIT, encode_result
from nagara.store.certificates import CA

CONNECT_S = 4.0  # TCP, TLS and the proofs together; below what callers wait for an answer
KEEP_S = 10.0
MOST_KEPT = 16  # idle connections to one agent


class AgentNetwork:
    """The way to all agents of a cluster; a context, whose end closes every connection."""

    def __init__(self, membership: Membership) -> None:
        self._token = membership.token
        self._certificates = membership.certificates
        self._kept: defaultdict[str, list[tuple[Channel, asyncio.TimerHandle]]] = defaultdict(list)
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for kept in self._kept.values():
            for channel, timer in kept:
                timer.cancel()
                channel.close()
        self._kept.clear()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def transport(self, address: str) -> "TcpTransport":
        """The way to the agent at `tcp://HOST:PORT`. Does not connect yet."""
        return TcpTransport(self, address)

    async def connect(self, address: str) -> Channel:
        """A new connection to an agent that has proven itself. Raises `NodeUnavailableError`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._connect(address)
        except TimeoutError as error:
            raise _away(f"no connection within {CONNECT_S:g} s", address) from error
        except ssl.SSLError as error:
            raise _away(f"TLS failed: {_said(error)}", address, self._tls_hint(error)) from error
        except OSError as error:
            hint = "start it there with `nagara agent --listen`"
            said = str(error) if not error.errno else os.strerror(error.errno)
            raise _away(said.lower(), address, hint) from error
        except (HelloError, UsageError) as error:
            raise _away(error.what, address, error.hint) from error

    async def _connect(self, address: str) -> Channel:
        connection = await _connected(*split_address(address))
        channel: Channel = SocketChannel(connection)
        try:
            watch_peer(connection)
            if self._certificates is not None:
                context = self._certificates.as_caller
                channel = tls = TlsChannel(connection, context, is_server=False)
                await tls.handshake()
            await greet(channel, self._token)
        except BaseException:
            channel.close()
            raise
        return channel

    def _tls_hint(self, error: ssl.SSLError) -> str | None:
        assert self._certificates is not None
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the agent's certificate must be signed by {self._certificates.folder / CA}"
        return "both sides need --certificates, with certificates of one authority"

    def kept(self, address: str) -> Channel | None:
        """A connection that an earlier call has left, if there is one."""
        kept = self._kept.get(address)
        if not kept:
            return None
        channel, timer = kept.pop()
        timer.cancel()
        return channel

    def keep(self, address: str, channel: Channel) -> None:
        """A call has ended and left its connection as it was."""
        kept = self._kept[address]
        if len(kept) >= MOST_KEPT:
            channel.close()
            return
        timer = asyncio.get_running_loop().call_later(KEEP_S, self._let_go, address, channel)
        kept.append((channel, timer))

    def _let_go(self, address: str, channel: Channel) -> None:
        left = [one for one in self._kept[address] if one[0] is not channel]
        self._kept[address] = left
        if not left:
            del self._kept[address]
        channel.close()

    def pump(self, channel: Channel) -> socket.socket:
        """A plain socket whose bytes go through the channel, framed."""
        near, far = local_pair()
        work = forward(Framed(channel), SocketChannel(far))
        pump = asyncio.create_task(work, name="pump of a dialled replica")
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return near


class TcpTransport:
    """The way to one agent."""

    def __init__(self, network: AgentNetwork, address: str) -> None:
        self._network = network
        self.where = address

    async def connect(self) -> Channel:
        return await self._network.connect(self.where)

    def kept(self) -> Channel | None:
        return self._network.kept(self.where)

    def keep(self, channel: Channel) -> None:
        self._network.keep(self.where, channel)

    async def dial(self, channel: Channel, request: bytes) -> tuple[bytes, socket.socket | None]:
        await channel.write(request)
        line = await channel.read_line(MESSAGE_LIMIT)
        if line != encode_result("dial", None):
            return line, None
        if isinstance(channel, SocketChannel):
            return line, channel.socket
        return line, self._network.pump(channel)


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)
        except OSError as error:
            connection.close()
            problem = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise problem or OSError("the host has no address")


def _away(what: str, address: str, hint: str | None = None) -> NodeUnavailableError:
    return NodeUnavailableError(
        f"the node agent cannot be reached: {what}", where=address, hint=hint
    )


def _said(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()
