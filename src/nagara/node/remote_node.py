"""The `Node` protocol spoken to an agent in another process, here or on another machine.

Belongs to one event loop. Each call has a connection to itself while it lasts; cancelling the
call closes it, which cancels it at the agent. Every call says by what right it is made.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from nagara.contract.node import DeposedError, NodeUnavailableError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartOrder,
    StartReport,
)
from nagara.node.mandate import Mandate
from nagara.node.network.channel import Channel
from nagara.node.transport import Transport, UnixTransport
from nagara.node.wire import MESSAGE_LIMIT, ONCE, decode_reply, encode_request

Reply = TypeVar("Reply")


class RemoteNode:
    """A node whose agent is reached by a transport; a path is that of its Unix socket."""

    def __init__(self, transport: Transport | Path, mandate: Mandate | None = None) -> None:
        self._way = UnixTransport(transport) if isinstance(transport, Path) else transport
        self._mandate = mandate or Mandate()

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

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        return await self.call("usage")  # type: ignore[no-any-return]

    async def disk(self) -> DiskReport:
        return await self.call("disk")  # type: ignore[no-any-return]

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        tail_bytes = min(tail_bytes, MESSAGE_LIMIT // 2)
        return await self.call("logs", replica=replica, tail_bytes=tail_bytes)  # type: ignore[no-any-return]

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        return await self.call("snapshots")  # type: ignore[no-any-return]

    async def forget_app(self, tenant: str, app: str) -> None:
        await self.call("forget_app", tenant=tenant, app=app)

    async def dial(self, replica: str) -> socket.socket:
        request = encode_request("dial", {"replica": replica}, self._mandate.epoch())

        async def dial(channel: Channel) -> tuple[bytes, socket.socket | None]:
            line, dialled = await self._way.dial(channel, request)
            return line or self._gone(), dialled

        channel, (line, dialled) = await self._over_channel(dial, may_repeat=True)
        if dialled is None:
            self._way.keep(channel)
            self._heard("dial", line)
            raise self._absence()
        return dialled

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        request = encode_request("exits", {}, self._mandate.epoch())
        channel = await self._way.connect()
        try:
            await channel.write(request)
            while True:
                yield self._heard("exits", await channel.read_line(MESSAGE_LIMIT) or self._gone())
        except OSError as error:
            raise self._absence(error) from error
        finally:
            channel.close()

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request and its answer. Raises what the agent says, or `NodeUnavailableError`."""
        request = encode_request(method, arguments, self._mandate.epoch())

        async def ask(channel: Channel) -> bytes:
            await channel.write(request)
            return await channel.read_line(MESSAGE_LIMIT) or self._gone()

        channel, line = await self._over_channel(ask, may_repeat=method not in ONCE)
        self._way.keep(channel)
        return self._heard(method, line)

    def _heard(self, method: str, line: bytes) -> Any:
        try:
            return decode_reply(method, line)
        except DeposedError as error:
            refusal = DeposedError(error.what, where=self._way.where, hint=error.hint)
            self._mandate.on_refused(refusal)
            raise refusal from error

    async def _over_channel(
        self, work: Callable[[Channel], Awaitable[Reply]], *, may_repeat: bool
    ) -> tuple[Channel, Reply]:
        """Carries it out over a connection, which is closed if that fails.

        Over one that was kept, the agent may have left it meanwhile: then over a new one.
        """
        if may_repeat and (kept := self._way.kept()) is not None:
            with suppress(OSError, NodeUnavailableError):
                return kept, await _closing(kept, work)
        channel = await self._way.connect()
        try:
            return channel, await _closing(channel, work)
        except OSError as error:
            raise self._absence(error) from error

    def _absence(self, error: OSError | None = None) -> NodeUnavailableError:
        what = "the node agent ended in the middle of a call"
        return NodeUnavailableError(f"{what}: {error}" if error else what, where=self._way.where)

    def _gone(self) -> bytes:
        raise self._absence()


async def _closing(channel: Channel, work: Callable[[Channel], Awaitable[Reply]]) -> Reply:
    try:
        return await work(channel)
    except BaseException:
        channel.close()
        raise
