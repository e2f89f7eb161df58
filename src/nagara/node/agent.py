"""The agent: a node offered over a Unix socket to control processes without its rights.

Whoever may connect can have any command run in a container by root, so the peer's user id is
checked on each connection, not only the socket's mode. One task per connection.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from nagara.base.errors import NagaraError
from nagara.contract.machine import MachineAgent
from nagara.contract.node import Node, NodeError
from nagara.node.wire import (
    MACHINE_METHODS,
    MESSAGE_LIMIT,
    decode_request,
    encode_error,
    encode_result,
)
from nagara.sandbox.unix_socket import listen, peer_uid

_ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class AgentServer:
    """Serves a node at a socket.

    Args:
        allowed_uids: users who may connect besides the agent's own.
        owner: user who shall own the socket file.
        machine: what the pool asks of the machine; None: only its replicas are offered.
    """

    def __init__(
        self,
        node: Node,
        path: Path,
        *,
        allowed_uids: Collection[int] = (),
        owner: int | None = None,
        machine: MachineAgent | None = None,
    ) -> None:
        self._node = node
        self._machine = machine
        self._path = path
        self._allowed = {os.getuid(), *allowed_uids}
        self._owner = owner

    async def run(self) -> None:
        """Serves until cancelled; calls still under way are then cancelled too."""
        loop = asyncio.get_running_loop()
        server = listen(self._path, owner=self._owner)
        server.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(server)
                    except OSError as error:  # most likely no descriptor is left
                        _log.error("a connection to the agent cannot be accepted: %s", error)
                        await asyncio.sleep(_ACCEPT_PAUSE_S)
                        continue
                    group.create_task(self._serve(connection))
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
                await self._answer(connection)
            except OSError as error:  # the caller has gone; its call was cancelled
                _log.debug("a caller went away: %s", error)
            except Exception:  # noqa: BLE001 - the root of this connection's task
                _log.exception("a call to the agent failed")

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        line = await _read_line(connection)
        if not line:
            return
        try:
            method, arguments = decode_request(line)
        except ValueError as error:
            await loop.sock_sendall(connection, encode_error(error))
            return
        call = asyncio.ensure_future(self._call(connection, method, arguments))
        # Callers send nothing after their request: whatever becomes readable is their leaving.
        gone = asyncio.ensure_future(loop.sock_recv(connection, 1))
        try:
            await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not call.done():
                call.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)
        if not call.cancelled():
            call.result()

    async def _call(
        self, connection: socket.socket, method: str, arguments: dict[str, Any]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            if method == "exits":
                async for status in self._exits():
                    await loop.sock_sendall(connection, encode_result(method, status))
                return
            asked = self._machine if method in MACHINE_METHODS else self._node
            if asked is None:
                raise NodeError(f"this agent does not answer to {method!r}")
            result = await getattr(asked, method)(**arguments)
        except (NagaraError, ConnectionError) as error:
            await loop.sock_sendall(connection, encode_error(error))
            return
        except Exception as error:
            await loop.sock_sendall(connection, encode_error(error))
            raise  # a fault of nagara's own: its trace is logged at the task's root
        if method == "dial":
            with result:
                socket.send_fds(connection, [encode_result(method, None)], [result.fileno()])
        else:
            await loop.sock_sendall(connection, encode_result(method, result))

    async def _exits(self) -> AsyncIterator[Any]:
        exits = self._node.exits()
        try:
            async for status in exits:
                yield status
        finally:
            with contextlib.suppress(AttributeError):
                await exits.aclose()  # type: ignore[attr-defined]  # a generator wherever it matters


async def _read_line(connection: socket.socket) -> bytes:
    """Up to and with the first newline; empty when the peer left before."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while not received.endswith(b"\n"):
        data = await loop.sock_recv(connection, 65536)
        if not data or len(received) > MESSAGE_LIMIT:
            return b""
        received += data
    return bytes(received)
