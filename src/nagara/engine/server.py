"""The engine's OpenAI-compatible HTTP server.

Everything here runs in one asyncio loop; the engine's step thread is reached through `submit` and
`cancel` only. The port is open from the start: until a first token has been computed, `/health`
and every call answer 503.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from nagara.engine import openai_api as api
from nagara.engine.answer import merge
from nagara.engine.answer_stream import AnswerStream
from nagara.engine.control_token import check_token
from nagara.engine.engine import Engine
from nagara.engine.errors import EngineError, RequestError, UnknownModelError
from nagara.engine.fields import parse_body
from nagara.engine.metrics import ServerMetrics
from nagara.engine.openai_shapes import ChatShape, CompletionShape, Shape
from nagara.engine.request import Output, SamplingParams
from nagara.engine.settings import EngineSettings
from nagara.engine.tokenizer import LONG_TEXT, Tokenizer
from nagara.engine.weight_stream import Streamed

log = logging.getLogger("nagara.engine")

MAX_BODY_BYTES = 8 << 20
AWAKE_NOT_NEEDED = ("/wake", "/sleep", "/metrics")
LAST_WORDS_S = 0.3  # how long open connections may take when the server ends

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Where to serve which model under which name."""

    folder: Path
    port: int
    host: str = "127.0.0.1"
    model_name: str | None = None  # the folder's name when None
    engine: EngineSettings = field(default_factory=EngineSettings)

    @property
    def served_name(self) -> str:
        return self.model_name or self.folder.resolve().name


class ModelServer:
    """One model behind OpenAI's paths. `load` makes it ready; `close` ends it."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._name = settings.served_name
        self._engine: Engine | None = None
        self._is_ready = False
        self._metrics = ServerMetrics()
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES,
            middlewares=[self._count, _errors_in_openai_shape, self._gate],
        )
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake", self._wake)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def load(self) -> None:
        """Map the model and compute a first token; ready afterwards.

        Raises:
            EngineError: the model cannot be served.
        """
        started = time.monotonic()
        folder, engine_settings = self._settings.folder, self._settings.engine
        engine = await asyncio.to_thread(Engine, folder, engine_settings)
        self._engine = engine
        engine.start()
        log.info("warming up%s", ": compiling" if self._settings.engine.is_compiled else "")
        # Many rows, then one row, then a longer context: each shape of work once.
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        prompt = [0] * min(8, engine.context - params.max_tokens)
        async for _ in self.engine.stream(prompt, params):
            pass
        self._is_ready = True
        log.info("ready after %.2f s: %s", time.monotonic() - started, self._name)

    async def failed(self) -> EngineError | None:
        """Returns once the engine has ended, with the reason when nobody has ended it."""
        return await asyncio.to_thread(self.engine.join)

    def close(self) -> bool:
        """End the engine; False if its thread is still inside a step."""
        self._is_ready = False
        return self._engine is None or self._engine.close(timeout_s=0.2)

    # Paths

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        self._metrics.count_request(response.status)
        return response

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_ready:
            body = api.error_body("the model is loading", "unavailable_error", None, "loading")
            return web.json_response(body, status=503, headers={"Retry-After": "1"})
        if self.engine.failure is not None:
            body = api.error_body(self.engine.failure.what, "server_error", None, "failed")
            return web.json_response(body, status=503)
        if self.engine.is_asleep and request.path not in AWAKE_NOT_NEEDED:
            body = api.error_body("the engine is asleep", "unavailable_error", None, "asleep")
            return web.json_response(body, status=503, headers={"Retry-After": "1"})
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        found = {"status": "ready", "model": self._name, **_weights(self.engine.read)}
        return web.json_response(found)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        text = self._metrics.text(self.engine.stats())
        return web.Response(text=text, content_type="text/plain")

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = api.parse_tokenize(parse_body(await request.read()))
        if isinstance(asked, str):
            tokens = await self._encode(asked)
        else:
            tokens = await asyncio.to_thread(self._tokens.chat_prompt, asked, None)
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.context}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = api.parse_detokenize(parse_body(await request.read()))
        if not all(0 <= token < self.engine.config.vocab for token in tokens):
            raise RequestError("a token id is out of range", where="tokens")
        return web.json_response({"prompt": self._tokens.decode(tokens, skip_special=False)})

    async def _sleep(self, request: web.Request) -> web.Response:
        check_token(request.headers.get("Authorization"))
        weights = request.query.get("weights", "kept")
        if weights not in ("kept", "released"):
            raise RequestError("must be kept or released", where="weights")
        releases = weights == "released"
        await asyncio.to_thread(self.engine.sleep, releases_weights=releases)
        return web.json_response({"status": "asleep"})

    async def _wake(self, request: web.Request) -> web.Response:
        check_token(request.headers.get("Authorization"))
        woken = await asyncio.to_thread(self.engine.wake)
        found: dict[str, Any] = {"status": "ready"}
        if woken is not None:
            found |= {"cache_blocks": woken.blocks, "keeps_graphs": woken.keeps_graphs}
            found |= _weights(woken.weights)
        return web.json_response(found)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "nagara",
            "max_model_len": self.engine.context,
        }

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        parsed = api.parse_completion(parse_body(await request.read()))
        self._check_model(parsed.call.model)
        prompts = [p if isinstance(p, list) else await self._encode(p) for p in parsed.prompts]
        echo = []
        if parsed.has_echo:
            echo = [p if isinstance(p, str) else self._tokens.decode(p) for p in parsed.prompts]
        shape = CompletionShape(self._name, echo, parsed.call.n)
        return await self._answer(request, shape, parsed.call, prompts)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        parsed = api.parse_chat(parse_body(await request.read()), self.engine.context)
        self._check_model(parsed.call.model)
        prompt = await asyncio.to_thread(
            self._tokens.chat_prompt, parsed.messages, parsed.tools, **parsed.template_values
        )
        call = parsed.call
        if not parsed.has_max_tokens:
            room = max(1, self.engine.context - len(prompt))
            call = replace(call, params=replace(call.params, max_tokens=room))
        shape = ChatShape(self._name)
        return await self._answer(request, shape, call, [prompt], parsed.tools is not None)

    async def _encode(self, text: str) -> list[int]:
        """Long texts on a thread: neither this loop nor, as no GIL is held, the step loop waits."""
        if len(text) < LONG_TEXT:
            return self._tokens.encode(text)
        return await asyncio.to_thread(self._tokens.encode, text)

    def _check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is."""
        if name is not None and name != self._name:
            raise UnknownModelError(
                f"the model {name!r} is not served here; {self._name!r} is", where="model"
            )

    @property
    def engine(self) -> Engine:
        """The engine, once it is loaded."""
        assert self._engine is not None
        return self._engine

    @property
    def _tokens(self) -> Tokenizer:
        return self.engine.tokenizer

    # Answers

    async def _answer(
        self,
        request: web.Request,
        shape: Shape,
        call: api.Call,
        prompts: Sequence[list[int]],
        has_tools: bool = False,
    ) -> web.StreamResponse:
        for prompt in prompts:
            self.engine.check(prompt, call.params)
        jobs = [
            (prompt, _choice_params(call.params, choice))
            for prompt in prompts
            for choice in range(call.n)
        ]
        shape.use(self._tokens, call.params, has_tools=has_tools)
        # All are begun before anything is answered: what is refused is refused with its status
        with contextlib.ExitStack() as begun:
            streams = [
                begun.enter_context(contextlib.closing(self.engine.stream(p, params)))
                for p, params in jobs
            ]
            if call.is_stream:
                return await self._streamed(request, shape, call, streams)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._whole(stream)) for stream in streams]
            return web.json_response(shape.whole([task.result() for task in tasks], call.n))

    async def _streamed(
        self,
        request: web.Request,
        shape: Shape,
        call: api.Call,
        streams: Sequence[AnswerStream],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has gone: nobody to tell
            await self._send_stream(response, shape, call, streams)
        return response

    async def _send_stream(
        self,
        response: web.StreamResponse,
        shape: Shape,
        call: api.Call,
        streams: Sequence[AnswerStream],
    ) -> None:
        try:
            # Closed at once when the client leaves: closing cancels what is still computed
            async with contextlib.aclosing(self._merged(streams)) as merged:
                async for index, piece in merged:
                    for chunk in shape.chunks(index, piece):
                        await _send_event(response, chunk)
        except* EngineError as group:  # the status is sent already: the error is the last event
            await _send_event(response, _server_error(group))
        else:
            if call.wants_usage:
                await _send_event(response, shape.usage_chunk(call.n))
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _whole(self, stream: AnswerStream) -> Output:
        return merge([piece async for piece in self._timed(stream)])

    async def _timed(self, stream: AnswerStream) -> AsyncGenerator[Output, None]:
        """A request's pieces, counted."""
        metrics, before = self._metrics, time.monotonic()
        histogram = metrics.first_token
        async with contextlib.aclosing(stream) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                histogram.add(now - before)
                before, histogram = now, metrics.between_tokens
                if piece.finish_reason is not None:
                    metrics.prompt_tokens += piece.prompt_tokens
                    metrics.completion_tokens += piece.completion_tokens
                yield piece

    async def _merged(
        self, streams: Sequence[AnswerStream]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """The pieces of all streams as they come, each with its stream's index."""
        pieces: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        async def follow(index: int, stream: AnswerStream) -> None:
            async for piece in self._timed(stream):
                pieces.put_nowait((index, piece))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(i, stream)) for i, stream in enumerate(streams)]
            try:
                left = len(streams)
                while left:
                    index, piece = await pieces.get()
                    left -= piece.finish_reason is not None
                    yield index, piece
            finally:
                for task in tasks:
                    task.cancel()


def _choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one seeded request draw differently from each other, the same each time."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice * 0x9E3779B9) % (1 << 63))


async def _send_event(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


@web.middleware
async def _errors_in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except* RequestError as group:
        error = _first(group)
        assert isinstance(error, RequestError)
        body = api.error_body(error.what, "invalid_request_error", error.where, error.code)
        status = error.status
    except* EngineError as group:
        body = _server_error(group)
        status = 500
    except* web.HTTPException as group:
        http = _first(group)
        assert isinstance(http, web.HTTPException)
        body = api.error_body(http.reason, "invalid_request_error", None, None)
        status = http.status
    return web.json_response(body, status=status)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _server_error(group: BaseExceptionGroup[BaseException]) -> dict[str, Any]:
    return api.error_body(str(_first(group)), "server_error", None, None)


async def run_server(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        EngineError: the model cannot be served, the port is taken, or the engine failed: whoever
            supervises this process starts another.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = ModelServer(settings)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=LAST_WORDS_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        raise EngineError(
            f"cannot listen: {error.strerror}", where=f"{settings.host}:{settings.port}"
        ) from error
    log.info("listening on %s:%d", settings.host, settings.port)
    loading = asyncio.create_task(server.load())
    ending = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await _until_over(server, ending)
    finally:
        log.info("ending")
        is_idle = server.close()
        await runner.cleanup()
    if not (is_idle and loading.done()):
        # A step or a compilation cannot be interrupted; nothing of it is worth waiting for.
        sys.stderr.flush()
        os._exit(0)


async def _until_over(server: ModelServer, ending: "asyncio.Task[Any]") -> None:
    failing = asyncio.create_task(server.failed())
    await asyncio.wait({failing, ending}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done() and not ending.done() and (failure := failing.result()) is not None:
        raise failure


def _weights(read: Streamed | None) -> dict[str, Any]:
    """What an answer says of them, where they were read."""
    if read is None:
        return {}
    seconds, rate = round(read.seconds, 4), round(read.gb_s, 3)
    return {"weights": {"size_bytes": read.size_bytes, "seconds": seconds, "gb_s": rate}}


def serve(settings: ServeSettings) -> None:
    """Run the server in this process until it is told to end; logs go to standard error."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    asyncio.run(run_server(settings))
