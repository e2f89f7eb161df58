"""The web server's own limits: how large a request's head may be, and how slowly it may come.

What the handler decides begins when a head is complete. A client that sends one too slowly, or
none at all, is cut off here; between two requests of one connection the library's own time-out
for idle connections applies. Bodies are bounded in time by whoever reads them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

HEAD_S = 20.0
MAX_LINE_BYTES = 65536
MAX_HEAD_BYTES = 256 * 1024
IDLE_S = 75.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    """One client's connection, with a time limit and a size limit for each head."""

    def __init__(self, *arguments: Any, head_s: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head_s = head_s
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._tail = b""  # of the head so far
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_answering:
            self._await_head()
            self._head_bytes += len(data)
            if b"\r\n\r\n" in self._tail + data:
                self._is_answering = True  # what follows is a body, or the next one's head
            elif self._head_bytes > MAX_HEAD_BYTES:
                self._cut()
                return
            self._tail = data[-3:]
        super().data_received(data)

    def begins(self) -> None:
        """A head is complete: its request is being answered."""
        self._is_answering = True
        self._has_head()

    def ends(self) -> None:
        """The request was answered: the next head may come."""
        self._is_answering = False

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._head_s, self._cut)

    def _has_head(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._has_head()
        if self.transport is not None:
            self.transport.abort()


class LimitedServer(web.Server):
    """aiohttp's low-level server whose connections have limits.

    Without aiohttp's own router: an app's host name decides before any path does.
    """

    head_s = HEAD_S

    def __init__(self, handle: Handler) -> None:
        async def within(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.begins()
            try:
                return await handle(request)
            finally:
                connection.ends()

        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # bodies pass as they are: what codes them is announced
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "keepalive_timeout": IDLE_S,
            "lingering_time": 1.0,
        }
        super().__init__(within, handler_cancellation=True, **self._options)

    def __call__(self) -> RequestHandler:
        loop = asyncio.get_running_loop()
        return _Connection(self, loop=loop, head_s=self.head_s, **self._options)
