"""The agent over TCP, for control processes on other machines.

One task per connection. A caller has to prove itself within a few seconds before anything of it
is looked at; a dialled replica's bytes are forwarded over the same connection.
"""

import asyncio
import logging
import socket
import ssl

from nagara.base.errors import UsageError
from nagara.contract.machine import MachineAgent
from nagara.contract.node import Node
from nagara.node.answering import Answering
from nagara.node.control_epochs import ControlEpochs
from nagara.node.network.address import tcp_address
from nagara.node.network.channel import (
    Channel,
    SocketChannel,
    accepted,
    hold,
    reset,
    watch_peer,
)
from nagara.node.network.forwarding import Framed, forward
from nagara.node.network.hello import HelloError, meet
from nagara.node.network.membership import Membership
from nagara.node.network.tls_channel import TlsChannel
from nagara.node.wire import encode_result

HELLO_S = 5.0
IDLE_S = 60.0  # callers let idle connections go much earlier
MOST_STRANGERS = 256  # connections that have not proven themselves yet

_log = logging.getLogger(__name__)


class TcpAgentServer:
    """Serves a node at an address.

    Args:
        host, port: where to listen; port 0 takes a free one.
        membership: of the cluster whose control processes may call.
        machine: what the pool asks of the machine; None: only its replicas are offered.
        epochs: which control processes are answered, of all servers of the node together.

    Attributes:
        address: where it listens, as control processes are told it.
    """

    def __init__(
        self,
        node: Node,
        host: str,
        port: int,
        membership: Membership,
        *,
        machine: MachineAgent | None = None,
        epochs: ControlEpochs | None = None,
    ) -> None:
        epochs = epochs or ControlEpochs()
        self._answering = Answering(node, machine, _forward, epochs, idle_s=IDLE_S)
        self._membership = membership
        self._strangers = 0
        self._server = _listening(host, port)
        self.address = tcp_address(*self._server.getsockname()[:2])

    async def run(self) -> None:
        """Serves until cancelled; calls still under way are then cancelled too."""
        with self._server:
            async with asyncio.TaskGroup() as group:
                while True:
                    connection = await accepted(self._server)
                    if self._strangers >= MOST_STRANGERS:
                        _log.warning("too many callers that do not prove themselves")
                        reset(connection)
                    else:
                        group.create_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        channel: Channel | None = None
        try:
            connection.setblocking(False)
            watch_peer(connection)
            channel = await self._met(connection)
            if channel is not None:
                await self._answering.serve(channel)
        except OSError as error:  # the caller has gone; its call was cancelled
            _log.debug("a caller went away: %s", error)
        except Exception:  # noqa: BLE001 - the root of this connection's task
            _log.exception("a call to the agent failed")
        finally:
            SocketChannel(connection).close()

    async def _met(self, connection: socket.socket) -> Channel | None:
        """The channel of a caller that has proven itself."""
        peer = connection.getpeername()[0]
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_S):
                channel = await self._channel(connection)
                try:
                    await meet(channel, self._membership.token)
                except HelloError as error:
                    _log.warning("refused a connection of %s: %s", peer, error.what)
                    return None
                return channel
        except TimeoutError:
            _log.warning("refused a connection of %s: it did not prove itself in time", peer)
        except ssl.SSLError as error:
            _log.warning("refused a connection of %s: %s", peer, error.reason or error)
        finally:
            self._strangers -= 1
        return None

    async def _channel(self, connection: socket.socket) -> Channel:
        certificates = self._membership.certificates
        if certificates is None:
            return SocketChannel(connection)
        channel = TlsChannel(connection, certificates.as_agent, is_server=True)
        await channel.handshake()
        return channel


async def _forward(channel: Channel, dialled: socket.socket) -> None:
    await channel.write(encode_result("dial", None))
    dialled.setblocking(False)
    hold(dialled)
    if isinstance(channel, SocketChannel):
        hold(channel.socket)
        await forward(channel, SocketChannel(dialled))
    else:
        await forward(Framed(channel), SocketChannel(dialled))


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        server = socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise UsageError(
            f"cannot listen: {error.strerror or error}", where=tcp_address(host, port)
        ) from error
    server.setblocking(False)
    return server
