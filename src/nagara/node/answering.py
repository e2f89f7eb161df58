"""What an agent says to one connection's requests, whatever the connection is made of.

Requests of one connection are answered one after the other. A caller that becomes readable, or
leaves, before it has its answer has given the call up: then it is cancelled. So is a call whose
control process is deposed meanwhile.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from nagara.base.errors import NagaraError
from nagara.contract.machine import MachineAgent
from nagara.contract.node import DeposedError, Node, NodeError
from nagara.node.control_epochs import ControlEpochs
from nagara.node.network.channel import Channel
from nagara.node.wire import (
    MACHINE_METHODS,
    MESSAGE_LIMIT,
    decode_request,
    encode_error,
    encode_result,
)

HandOver = Callable[[Channel, socket.socket], Awaitable[None]]

_log = logging.getLogger(__name__)


class Answering:
    """A node, and what the pool asks of its machine, as answers.

    Args:
        machine: None: only replicas are offered.
        hand_over: gives a dialled socket to the caller; the connection is its own from then on.
        epochs: which control processes are answered.
        idle_s: a connection without a request for so long is closed; None: never.
    """

    def __init__(
        self,
        node: Node,
        machine: MachineAgent | None,
        hand_over: HandOver,
        epochs: ControlEpochs,
        *,
        idle_s: float | None = None,
    ) -> None:
        self._node = node
        self._machine = machine
        self._hand_over = hand_over
        self._epochs = epochs
        self._idle_s = idle_s

    async def serve(self, channel: Channel) -> None:
        """Until the caller leaves. Raises OSError if it does in the middle of an answer."""
        while line := await self._next(channel):
            try:
                method, arguments, epoch = decode_request(line)
            except ValueError as error:
                await channel.write(encode_error(error))
                return
            try:
                deposed = await self._epochs.admit(epoch, method)
            except DeposedError as error:
                _log.warning("refused %r: %s", method, error.what)
                await channel.write(encode_error(error))
                continue
            if method == "dial":
                await self._dial(channel, arguments, deposed)
                return
            call = self._call(channel, method, arguments)
            if not await _unless_over(channel, deposed, call):
                return

    async def _next(self, channel: Channel) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._idle_s):
                return await channel.read_line(MESSAGE_LIMIT)
        return b""

    async def _call(self, channel: Channel, method: str, arguments: dict[str, Any]) -> None:
        try:
            if method == "exits":
                async for status in self._exits():
                    await channel.write(encode_result(method, status))
                return
            asked = self._machine if method in MACHINE_METHODS else self._node
            if asked is None:
                raise NodeError(f"this agent does not answer to {method!r}")
            result = await getattr(asked, method)(**arguments)
        except (NagaraError, ConnectionError) as error:
            await channel.write(encode_error(error))
            return
        except Exception as error:
            await channel.write(encode_error(error))
            raise  # a fault of nagara's own: its trace is logged at the task's root
        await channel.write(encode_result(method, result))

    async def _dial(
        self, channel: Channel, arguments: dict[str, Any], deposed: asyncio.Future[None]
    ) -> None:
        dialled: list[socket.socket] = []

        async def dial() -> None:
            try:
                dialled.append(await self._node.dial(**arguments))
            except (NagaraError, ConnectionError) as error:
                await channel.write(encode_error(error))
            except Exception as error:
                await channel.write(encode_error(error))
                raise

        try:
            if await _unless_over(channel, deposed, dial()) and dialled:
                await self._hand_over(channel, dialled[0])
        finally:
            for opened in dialled:
                opened.close()

    async def _exits(self) -> AsyncIterator[Any]:
        exits = self._node.exits()
        try:
            async for status in exits:
                yield status
        finally:
            with contextlib.suppress(AttributeError):
                await exits.aclose()  # type: ignore[attr-defined]  # a generator wherever it matters


async def _unless_over(channel: Channel, deposed: asyncio.Future[None], work: Any) -> bool:
    """Carries the coroutine out; cancels it when the caller leaves or is deposed first: then
    False."""
    call = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(channel.readable())
    try:
        await asyncio.wait((call, gone, deposed), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not call.done():
            call.cancel()
        await asyncio.gather(call, gone, return_exceptions=True)
    if call.cancelled():
        return False
    call.result()
    return True
