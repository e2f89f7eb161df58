"""How calls get to an agent: what `RemoteNode` needs of it, and the way by a Unix socket."""

import socket
from pathlib import Path
from typing import Protocol

from nagara.contract.node import NodeUnavailableError
from nagara.node.network.channel import Channel, SocketChannel, until_readable
from nagara.node.wire import MESSAGE_LIMIT
from nagara.sandbox.unix_socket import connect

_CONNECT_S = 10.0


class Transport(Protocol):
    """The way to one agent. Methods raise OSError when a connection breaks."""

    @property
    def where(self) -> str:
        """Names the agent in messages."""
        ...

    async def connect(self) -> Channel:
        """A new connection to it. Raises `NodeUnavailableError`."""
        ...

    def kept(self) -> Channel | None:
        """A connection that an earlier call has left, if there is one."""
        ...

    def keep(self, channel: Channel) -> None:
        """A call has ended and left its connection as it was."""
        ...

    async def dial(self, channel: Channel, request: bytes) -> tuple[bytes, socket.socket | None]:
        """The reply to a `dial`, and the replica's socket unless it is an error.

        With the socket the channel is used up.
        """
        ...


class UnixTransport:
    """An agent whose socket is at `path`. A dialled replica comes as a descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    async def connect(self) -> Channel:
        try:
            connection = connect(self._path, timeout_s=_CONNECT_S)
        except OSError as error:
            raise NodeUnavailableError(
                f"the node agent cannot be reached: {error.strerror or error}",
                where=self.where,
                hint="start it with `nagara agent`, or everything with `nagara up`",
            ) from error
        connection.setblocking(False)
        return SocketChannel(connection)

    def kept(self) -> Channel | None:
        return None  # connecting costs nothing here

    def keep(self, channel: Channel) -> None:
        channel.close()

    async def dial(self, channel: Channel, request: bytes) -> tuple[bytes, socket.socket | None]:
        assert isinstance(channel, SocketChannel)
        await channel.write(request)
        await until_readable(channel.socket)
        line, descriptors, _, _ = socket.recv_fds(channel.socket, MESSAGE_LIMIT, 1)
        if not descriptors:
            return line, None
        dialled = socket.socket(fileno=descriptors[0])
        dialled.setblocking(False)
        channel.close()
        return line, dialled
