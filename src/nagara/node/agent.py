"""The agent: a node offered over a Unix socket to control processes without its rights.

Whoever may connect can have any command run in a container by root, so the peer's user id is
checked on each connection, not only the socket's mode. One task per connection. A dialled
replica is handed over as a descriptor.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Collection
from pathlib import Path

from nagara.contract.machine import MachineAgent
from nagara.contract.node import Node
from nagara.node.answering import Answering
from nagara.node.control_epochs import ControlEpochs
from nagara.node.network.channel import Channel, SocketChannel, accepted
from nagara.node.wire import encode_result
from nagara.sandbox.unix_socket import listen, peer_uid

_log = logging.getLogger(__name__)


class AgentServer:
    """Serves a node at a socket.

    Args:
        allowed_uids: users who may connect besides the agent's own.
        owner: user who shall own the socket file.
        machine: what the pool asks of the machine; None: only its replicas are offered.
        epochs: which control processes are answered, of all servers of the node together.
    """

    def __init__(
        self,
        node: Node,
        path: Path,
        *,
        allowed_uids: Collection[int] = (),
        owner: int | None = None,
        machine: MachineAgent | None = None,
        epochs: ControlEpochs | None = None,
    ) -> None:
        self._answering = Answering(node, machine, _hand_over, epochs or ControlEpochs())
        self._path = path
        self._allowed = {os.getuid(), *allowed_uids}
        self._owner = owner

    async def run(self) -> None:
        """Serves until cancelled; calls still under way are then cancelled too."""
        server = listen(self._path, owner=self._owner)
        server.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(self._serve(await accepted(server)))
        finally:
            server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            if (uid := peer_uid(connection)) not in self._allowed:
                _log.warning("refused a connection of user %d", uid)
                return
            connection.setblocking(False)
            try:
                await self._answering.serve(SocketChannel(connection))
            except OSError as error:  # the caller has gone; its call was cancelled
                _log.debug("a caller went away: %s", error)
            except Exception:  # noqa: BLE001 - the root of this connection's task
                _log.exception("a call to the agent failed")


async def _hand_over(channel: Channel, dialled: socket.socket) -> None:
    assert isinstance(channel, SocketChannel)
    socket.send_fds(channel.socket, [encode_result("dial", None)], [dialled.fileno()])
