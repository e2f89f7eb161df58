"""The HTTP server that stands for a replica on a fake node.

    GET  /health             "ok"
    ANY  /echo/...           JSON: method, path, headers, body length and SHA-256, replica
    POST /upload             reads the body as it comes; JSON: bytes, SHA-256
    GET  /download?bytes=N   N bytes
    GET  /sse?events=N       N server-sent events, each when the test calls `next_event`
    GET  /wait               answers when the test calls `let_go`
    GET  /cut                half an answer, then the connection is closed
    GET  /ws                 WebSocket echo; subprotocol "echo" if offered
    GET  /page               an HTML page
    GET  /exit?code=N        the replica ends
    POST /v1/completions     an OpenAI answer, also streaming; so does /v1/chat/completions
    *    anything else       404

Every request is noted in `requests` when it arrives and in `cancelled` when its client goes away.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable

from aiohttp import WSMsgType, web

from nagara.contract.replica import StartOrder


class FakeReplica:
    """One server on a free loopback port."""

    def __init__(self, order: StartOrder, exited: Callable[[str, int], Awaitable[None]]) -> None:
        self.order = order
        self.port = 0
        self.requests: list[str] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.most_running = 0
        self.connections = 0
        self._exited = exited
        self._may_go = asyncio.Event()
        self._events = asyncio.Semaphore(0)
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Listens."""
        app = web.Application(middlewares=[self._note], client_max_size=2**30)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/echo{rest:.*}", self._echo)
        app.router.add_post("/upload", self._upload)
        app.router.add_get("/download", self._download)
        app.router.add_get("/sse", self._sse)
        app.router.add_route("*", "/wait", self._wait)
        app.router.add_get("/cut", self._cut)
        app.router.add_get("/ws", self._websocket)
        app.router.add_get("/page", self._page)
        app.router.add_get("/exit", self._exit)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        # The shortest time-out there is: 0 would be none at all.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        # Cancelled in the middle, the loop would lose sight of a port that it listens on already.
        listening = asyncio.ensure_future(self._listen(self._runner))
        try:
            await asyncio.shield(listening)
        finally:
            await asyncio.wait((listening,))
        self.port = self._runner.addresses[0][1]

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def end(self) -> None:
        """Closes the port and every connection at once, as a process that is killed."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        if runner.server is not None:
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    def let_go(self) -> None:
        """Lets requests to /wait be answered, now and later."""
        self._may_go.set()

    def next_event(self) -> None:
        """Lets one /sse stream send its next event."""
        self._events.release()

    def log_text(self) -> bytes:
        """What this replica "printed"."""
        return "".join(f"{line}\n" for line in ["ready", *self.requests]).encode()

    # -- handlers --------------------------------------------------------------------------

    @web.middleware
    async def _note(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.raw_path}")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.raw_path)
            raise
        finally:
            self.running -= 1

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>app</title>", content_type="text/html")

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        document = {
            "method": request.method,
            "path": request.raw_path,
            "headers": [[name, value] for name, value in request.headers.items()],
            "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "replica": self.order.replica,
        }
        return web.json_response(document, headers={"X-Echo": "yes", "Connection": "X-Secret"})

    async def _upload(self, request: web.Request) -> web.Response:
        digest, size_bytes = hashlib.sha256(), 0
        async for piece in request.content.iter_any():
            digest.update(piece)
            size_bytes += len(piece)
        return web.json_response({"bytes": size_bytes, "sha256": digest.hexdigest()})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        left = int(request.query["bytes"])
        response = web.StreamResponse()
        if "length" in request.query:
            response.content_length = left
        await response.prepare(request)
        block = bytes(range(256)) * 1024
        while left:
            piece = block[:left]
            await response.write(piece)
            left -= len(piece)
        await response.write_eof()
        return response

    async def _sse(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(int(request.query["events"])):
            await self._events.acquire()
            await response.write(f"data: {number}\n\n".encode())
        await response.write_eof()
        return response

    async def _wait(self, request: web.Request) -> web.Response:
        await self._may_go.wait()
        return web.json_response({"replica": self.order.replica})

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("echo",), max_msg_size=0)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT and message.data == "bye":
                await socket.close(code=4001, message=b"as you wish")
            elif message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket

    async def _exit(self, request: web.Request) -> web.Response:
        code = int(request.query.get("code", "0"))
        loop = asyncio.get_running_loop()

        def go() -> None:
            task = asyncio.ensure_future(self._exited(self.order.replica, code))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.call_later(0.01, go)
        return web.Response(text="bye")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "text_completion", lambda text: {"text": text})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        document = await request.json()
        part = "delta" if document.get("stream") else "message"
        kind = "chat.completion.chunk" if document.get("stream") else "chat.completion"
        return await self._answer(
            request, kind, lambda text: {part: {"role": "assistant", "content": text}}
        )

    async def _answer(
        self, request: web.Request, kind: str, choice: Callable[[str], dict[str, object]]
    ) -> web.StreamResponse:
        document = await request.json()
        answer = {"id": "fake", "object": kind, "created": 0, "model": document.get("model", "")}

        def with_text(text: str, reason: str | None) -> dict[str, object]:
            return {**answer, "choices": [{"index": 0, "finish_reason": reason, **choice(text)}]}

        if not document.get("stream"):
            return web.json_response(with_text("six seven", "stop"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, reason in (("six", None), (" seven", "stop")):
            await response.write(f"data: {json.dumps(with_text(text, reason))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
