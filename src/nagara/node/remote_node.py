"""The `Node` protocol over an agent's Unix socket. One connection per call.

Belongs to one event loop. Cancelling a call closes its connection, which cancels it at the
agent.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from nagara.contract.node import NodeUnavailableError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaStatus,
    StartOrder,
    StartReport,
)
from nagara.node.wire import MESSAGE_LIMIT, decode_reply, encode_request
from nagara.sandbox.unix_socket import connect

_CONNECT_S = 10.0


class RemoteNode:
    """A node whose agent listens at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def facts(self) -> NodeFacts:
        return await self.call("facts")  # type: ignore[no-any-return]

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        return await self.call("use_caches", caches=caches)  # type: ignore[no-any-return]

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        return await self.call("bring_image", order=order)  # type: ignore[no-any-return]

    async def start(self, order: StartOrder) -> StartReport:
        return await self.call("start", order=order)  # type: ignore[no-any-return]

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        return await self.call("capture", order=order)  # type: ignore[no-any-return]

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        await self.call("stop", replica=replica, grace_s=grace_s)

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        return await self.call("replicas")  # type: ignore[no-any-return]

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        tail_bytes = min(tail_bytes, MESSAGE_LIMIT // 2)
        return await self.call("logs", replica=replica, tail_bytes=tail_bytes)  # type: ignore[no-any-return]

    async def forget_app(self, tenant: str, app: str) -> None:
        await self.call("forget_app", tenant=tenant, app=app)

    async def dial(self, replica: str) -> socket.socket:
        loop = asyncio.get_running_loop()
        with self._connected() as connection:
            await loop.sock_sendall(connection, encode_request("dial", {"replica": replica}))
            await _until_readable(connection)
            line, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, 1)
        try:
            decode_reply("dial", line or self._gone())
            dialled = socket.socket(fileno=descriptors.pop())
        finally:
            for left in descriptors:
                socket.close(left)
        dialled.setblocking(False)
        return dialled

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        with self._connected() as connection:
            reader = _Lines(connection)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, encode_request("exits", {}))
            while True:
                yield decode_reply("exits", await reader.next() or self._gone())

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request and its answer. Raises what the agent says, or `NodeUnavailableError`."""
        loop = asyncio.get_running_loop()
        with self._connected() as connection:
            await loop.sock_sendall(connection, encode_request(method, arguments))
            line = await _Lines(connection).next() or self._gone()
        return decode_reply(method, line)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """A connection to the agent, closed afterwards; its own failure is the agent's absence."""
        try:
            connection = connect(self._path, timeout_s=_CONNECT_S)
        except OSError as error:
            raise NodeUnavailableError(
                f"the node agent cannot be reached: {error.strerror or error}",
                where=str(self._path),
                hint="start it with `nagara agent`, or everything with `nagara up`",
            ) from error
        connection.setblocking(False)
        with connection:
            try:
                yield connection
            except OSError as error:
                raise self._absence(error) from error

    def _absence(self, error: OSError | None = None) -> NodeUnavailableError:
        what = "the node agent ended in the middle of a call"
        return NodeUnavailableError(f"{what}: {error}" if error else what, where=str(self._path))

    def _gone(self) -> bytes:
        raise self._absence()


class _Lines:
    """Lines read from a non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    async def next(self) -> bytes:
        """The next line; empty at the end."""
        loop = asyncio.get_running_loop()
        while (end := self._received.find(b"\n")) < 0:
            data = await loop.sock_recv(self._connection, 65536)
            if not data or len(self._received) > MESSAGE_LIMIT:
                return b""
            self._received += data
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line


async def _until_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connection, readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
