"""HTTP connections to one replica, opened by the node that runs it.

An aiohttp client session whose connector asks `Node.dial` for each new connection instead of a
resolver. Connections are kept alive and used again by later requests of the same replica, for
less time than common servers keep theirs, so that a request is seldom sent into a closing one.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from nagara.base.errors import NagaraError
from nagara.contract.node import NodeUnavailableError

KEEP_ALIVE_S = 2.0
_READ_BUFFER_BYTES = 256 * 1024


class DialError(NagaraError):
    """No connection to the replica could be opened: nothing of the request was sent."""

    is_node_away = False  # its machine's agent does not answer; of the replica nothing is known


class BrokenOffError(NagaraError):
    """The replica left before an answer began; what it has done of the request is unknown."""


class _NodeConnector(aiohttp.BaseConnector):
    """Opens connections through a node.

    Overrides the one method that aiohttp's own connectors implement; public is only the choice
    between TCP and Unix addresses, and a replica has neither for us.
    """

    def __init__(self, dial: Callable[[], Awaitable[socket.socket]]) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._dial = dial

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        try:
            connected = await self._dial()
        except (NagaraError, OSError) as error:
            failed = DialError(f"the replica cannot be reached: {error}")
            failed.is_node_away = isinstance(error, NodeUnavailableError)
            raise failed from error
        try:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.create_connection(self._factory, sock=connected)
        except BaseException:
            connected.close()
            raise
        return protocol


class Upstream:
    """The client side of one replica."""

    def __init__(self, dial: Callable[[], Awaitable[socket.socket]]) -> None:
        self.session = aiohttp.ClientSession(
            connector=_NodeConnector(dial),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_READ_BUFFER_BYTES,
            max_line_size=65536,
            max_field_size=65536,
        )
        # The library would repeat idempotent requests by itself when a connection breaks, also
        # to a replica that has ended meanwhile; whether to repeat is the gateway's decision.
        self.session._retry_connection = False

    async def close(self) -> None:
        """Closes every connection; requests still running on them fail."""
        await self.session.close()
