"""HTTP in, HTTP out: finds the app, waits for a replica, passes everything through.

Called by the web server, one task per request; a client that goes away cancels its task, which
closes the connection to the replica. Bodies are streamed both ways; only a request routed by its
model is read first, because the model stands in its body. Scaling, queues and credits are the
dispatcher's.
"""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from nagara.base.clock import Clock
from nagara.control import headers as hop
from nagara.control.app import App
from nagara.control.auth import Auth, bearer
from nagara.control.dispatch import Dispatcher, Grant
from nagara.control.job_requests import answer_of, is_queued, queue
from nagara.control.jobs import Jobs
from nagara.control.refusal import Refusal, bad_request, not_found, unauthorised
from nagara.control.routing import (
    Target,
    app_of_host,
    app_of_model,
    check_path,
    target_of_path,
)
from nagara.control.telemetry import Telemetry
from nagara.control.token_tally import TokenTally
from nagara.control.tracing import Span
from nagara.control.upstream import BrokenOffError, DialError
from nagara.control.web_page import APART
from nagara.control.websocket import relay_websocket

MAX_ROUTED_BODY_BYTES = 64 * 2**20
ROUTED_BODY_S = 60.0  # how long a body may take whose model decides where it goes
_HELD_BODY_BYTES = 128 * 1024  # what a held request's unread body may occupy in buffers
_PIECE_BYTES = 256 * 1024
_TRIES = 3
_WHOLE_BYTES = 64 * 1024  # smaller answers are passed on when they are here; fits the buffers
_CLIENT_WENT = 499  # in figures and traces only

_log = logging.getLogger(__name__)
_access = logging.getLogger("nagara.access")


class Service(Protocol):
    """What the gateway must know of a deployed app."""

    @property
    def app(self) -> App: ...

    @property
    def dispatcher(self) -> Dispatcher: ...


@dataclass(slots=True)
class _Call:
    """One request on its way."""

    request: web.BaseRequest
    service: Service
    target: Target
    arrived_s: float
    body: bytes | None = None  # read and perhaps rewritten; None streams the client's
    is_key_ours: bool = True
    replica: str = ""  # the one that was asked last
    queue_s: float = 0.0
    span: Span | None = None
    may_repeat: bool = False  # its method allows it, and it was not repeated yet


class Gateway:
    """The request side of control.

    Args:
        services: the deployed apps by name, read at each request.
        broken: told when a replica could not be reached, with the reason.
        clock: for the waiting times in the answers' headers.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        auth: Auth,
        broken: Callable[[str, str, str], None],
        clock: Clock,
        telemetry: Telemetry,
        jobs: Jobs,
    ) -> None:
        self._jobs = jobs
        self._telemetry = telemetry
        self.is_ready = True  # told at /readyz; False while control stops
        self._services = services
        self._auth = auth
        self._broken = broken
        self._clock = clock

    def app_of_host(self, request: web.BaseRequest) -> str | None:
        """The deployed app that the request's host name means."""
        name = app_of_host(request.headers.get("Host"))
        return name if name in self._services else None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request that is not for the API."""
        arrived_s = self._clock.monotonic_s()
        try:
            call = await self._route(request, arrived_s)
        except Refusal as refusal:
            return self._refused(refusal, arrived_s)
        if isinstance(call, web.Response):
            return call
        path = request.raw_path.partition("?")[0]
        given = request.headers.get("traceparent")
        call.span = self._telemetry.request_begins(request.method, path, given)
        status = _CLIENT_WENT
        try:
            try:
                key = bearer(request.headers.get("Authorization"))
                with self._auth.admitted(key, call.target.app):
                    if is_queued(request) and not _is_websocket(request):
                        response = await self._queue(call)
                    else:
                        response = await self._serve(call)
            except Refusal as refusal:
                response = self._refused(refusal, arrived_s)
            status = response.status
            return response
        finally:
            total_s = self._clock.monotonic_s() - arrived_s
            self._telemetry.request_ends(call.span, call.target.app, status, total_s, call.replica)
            if _access.isEnabledFor(logging.INFO):
                _write_access(call, path, status, total_s)

    async def _queue(self, call: _Call) -> web.StreamResponse:
        """Takes the request on for later."""
        request = call.request
        headers = hop.request_headers(
            request.headers,
            peer=request.remote or "unknown",
            prefix=call.target.prefix,
            is_key_ours=call.is_key_ours,
            has_new_body=True,
        )
        headers.popall("Prefer", None)
        owner = self._auth.owner(bearer(request.headers.get("Authorization")))
        return await queue(
            *(self._jobs, request, call.target.app, owner, call.target.path),
            *(list(headers.items()), call.body),
        )

    def _refused(self, refusal: Refusal, arrived_s: float) -> web.Response:
        waited_ms = 1000 * (self._clock.monotonic_s() - arrived_s)
        return refusal.response({hop.QUEUE: f"{waited_ms:.1f}", hop.COLD_START: "0"})

    # -- which app -------------------------------------------------------------------------

    async def _route(self, request: web.BaseRequest, arrived_s: float) -> _Call | web.Response:
        raw_path = request.raw_path
        if raw_path == "/healthz":
            return web.Response(text="ok\n")
        if raw_path == "/readyz":
            if self.is_ready:
                return web.Response(text="ready\n")
            return web.Response(status=503, text="not ready\n")
        key = bearer(request.headers.get("Authorization"))
        is_key_ours = self._auth.knows(key)
        if not (is_key_ours or self._auth.is_open):
            raise unauthorised("the API key (Authorization: Bearer KEY)")
        by_host = self.app_of_host(request)
        if by_host is None and raw_path.startswith("/nagara/jobs/"):
            return await answer_of(self._jobs, request, self._auth.owner(key))
        check_path(raw_path)
        if request.method == "CONNECT":
            raise Refusal(405, "CONNECT is not served", code="method_not_allowed")
        if by_host is not None:
            target = Target(by_host, raw_path, "")
        else:
            target = target_of_path(raw_path)
            if target.app == "v1":
                return await self._route_by_model(request, arrived_s, is_key_ours)
            check_path(target.path)
        service = self._services.get(target.app)
        if service is None:
            raise not_found(f"no app {target.app!r} is deployed")
        return _Call(request, service, target, arrived_s, is_key_ours=is_key_ours)

    async def _route_by_model(
        self, request: web.BaseRequest, arrived_s: float, is_key_ours: bool
    ) -> _Call | web.Response:
        path = request.raw_path.partition("?")[0]
        if request.method in ("GET", "HEAD"):
            return self._models(path)
        document, body = await _read_json(request)
        model = document.get("model")
        if not isinstance(model, str):
            raise bad_request(
                "the body names no model; name one, or send the request to /APP/v1/..."
            )
        app = app_of_model(model, [service.app for service in self._services.values()])
        if app is None:
            raise Refusal(404, f"no app serves the model {model!r}", code="model_not_found")
        if app.served_model is not None and app.served_model != model:
            body = json.dumps({**document, "model": app.served_model}).encode()
        service = self._services[app.name]
        target = Target(app.name, request.raw_path, "")
        return _Call(request, service, target, arrived_s, body, is_key_ours)

    def _models(self, path: str) -> web.Response:
        entries = [
            {"id": service.app.name, "object": "model", "created": 0, "owned_by": "nagara"}
            for service in self._services.values()
        ]
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": entries})
        name = path.removeprefix("/v1/models/")
        for entry in entries:
            if entry["id"] == name:
                return web.json_response(entry)
        raise Refusal(404, f"no app {name!r} is deployed", code="model_not_found")

    # -- one request -----------------------------------------------------------------------

    async def _serve(self, call: _Call) -> web.StreamResponse:
        """Holds the request until it has a credit, then sends it; again if it never left.

        One that broke off is sent a second time, to another replica if there is one, where that
        does no harm. Not more often: it may be the request that ends replicas.
        """
        dispatcher = call.service.dispatcher
        dispatcher.demand.enter(call.arrived_s)
        try:
            failed = 0
            is_retry = False
            call.may_repeat = hop.is_idempotent(call.request.method, call.request.headers)
            while failed < _TRIES:
                grant = await dispatcher.acquire(
                    _held_bytes(call), arrived_s=call.arrived_s, is_retry=is_retry
                )
                is_retry = True
                try:
                    return await self._granted(call, grant)
                except DialError as error:
                    endpoint = grant.endpoint
                    if error.is_node_away and dispatcher.pause(endpoint):
                        continue
                    _log.warning("%s: %s", endpoint.replica, error)
                    self._broken(call.target.app, endpoint.replica, error.what)
                    failed += 1
                except BrokenOffError as error:
                    _log.warning("%s: %s; asking again", grant.endpoint.replica, error.what)
                    call.may_repeat = False
                    dispatcher.pause(grant.endpoint)
                finally:
                    dispatcher.release(grant.endpoint)
            raise Refusal(503, "no replica could be reached", code="unreachable", retry_after_s=1.0)
        finally:
            dispatcher.demand.leave(self._clock.monotonic_s())

    async def _granted(self, call: _Call, grant: Grant) -> web.StreamResponse:
        """Sends the request to the replica it was given to, and notes what comes of it."""
        call.replica, call.queue_s = grant.endpoint.replica, grant.queue_s
        started = grant.endpoint.started if grant.cold_start_s else None
        span = self._telemetry.request_is_sent(call.span, call.target.app, grant.queue_s, started)
        try:
            response = await self._send(call, grant, span)
        finally:
            self._telemetry.tracer.end(span)
        grant.endpoint.away_since_s = None
        grant.endpoint.has_answered |= response.status < 500
        return response

    async def _send(self, call: _Call, grant: Grant, span: Span | None) -> web.StreamResponse:
        request = call.request
        if call.body is None and request.body_exists and request.content.is_eof():
            # Small bodies are here already: they go out in one piece with their headers.
            call.body = request.content.read_nowait()
        own = {
            hop.QUEUE: f"{1000 * grant.queue_s:.1f}",
            hop.COLD_START: f"{1000 * grant.cold_start_s:.0f}",
            hop.REPLICA: grant.endpoint.replica,
        }
        is_websocket = _is_websocket(request)
        headers = hop.request_headers(
            request.headers,
            peer=request.remote or "unknown",
            prefix=call.target.prefix,
            is_key_ours=call.is_key_ours,
            has_new_body=call.body is not None,
            is_websocket=is_websocket,
        )
        if span is not None:
            headers["traceparent"] = span.traceparent
        url = URL(f"http://{grant.endpoint.replica}{call.target.path}", encoded=True)
        session = grant.endpoint.upstream.session
        if is_websocket:
            return await relay_websocket(request, session, url, headers, own)
        if request.headers.get("Expect", "").lower() == "100-continue" and call.body is None:
            await _send_continue(request)
        data: Any = None
        if call.body is not None:
            headers["Content-Length"] = str(len(call.body))
            data = _pieces(call.body) if len(call.body) > _PIECE_BYTES else call.body
        elif request.body_exists:
            data = request.content
        return await self._exchange(call, session, url, headers, data, own)

    async def _exchange(
        self,
        call: _Call,
        session: aiohttp.ClientSession,
        url: URL,
        headers: Mapping[str, str],
        data: Any,
        own: Mapping[str, str],
    ) -> web.StreamResponse:
        """Sends the request and passes the answer on, piece by piece as it comes."""
        request = call.request
        limit_s = call.service.app.timeouts.request_s
        response: web.StreamResponse | None = None
        try:
            async with (
                asyncio.timeout(limit_s),
                session.request(
                    request.method, url, headers=headers, data=data, allow_redirects=False
                ) as answer,
            ):
                if call.may_repeat and (answer.content_length or _WHOLE_BYTES) < _WHOLE_BYTES:
                    await _whole(answer)
                response = _begun(request, answer, hop.response_headers(answer.headers, own))
                if call.target.prefix and answer.content_type == "text/html":
                    response.headers.add("Content-Security-Policy", APART)
                tally = self._telemetry.tally(call.target.app, TokenTally(answer.headers))
                await response.prepare(request)
                if isinstance(response, web.Response):
                    tally(response.body if isinstance(response.body, bytes) else b"")
                else:
                    async for piece in answer.content.iter_any():
                        tally(piece)
                        await response.write(piece)
                await response.write_eof()
                return response
        except TimeoutError as error:
            failure = Refusal(504, f"no full answer within {limit_s:g} s", code="request_timeout")
            return _fail(request, response, failure, own, error)
        except (aiohttp.ClientError, ConnectionError) as error:
            what = f"the replica broke off: {error or type(error).__name__}"
            is_sent_on = response is not None and response.prepared
            if call.may_repeat and not is_sent_on and (data is None or call.body is not None):
                raise BrokenOffError(what) from error
            failure = Refusal(502, what, code="replica_failed")
            return _fail(request, response, failure, own, error)


async def _whole(answer: aiohttp.ClientResponse) -> None:
    """Returns when all of the answer is here. Raises what it broke off with."""
    if (broken := answer.content.exception()) is not None:
        raise broken
    await answer.content.wait_eof()


def _begun(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """The client's answer: whole, if all of a small one is here already, so that it goes out in
    one piece with its headers; else one whose body is still to be passed on."""
    body = b""
    if request.method != "HEAD" and answer.content.is_eof() and answer.content_length:
        body = answer.content.read_nowait()
    if body:
        return web.Response(status=answer.status, reason=answer.reason, headers=headers, body=body)
    return web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)


def _write_access(call: _Call, path: str, status: int, total_s: float) -> None:
    method, app = call.request.method, call.target.app
    fields = {
        "app": app, "status": status, "replica": call.replica, "method": method, "path": path,
        "duration_ms": round(1000 * total_s, 1), "queue_ms": round(1000 * call.queue_s, 1),
        **({} if call.span is None else {"trace_id": call.span.trace_id}),
    }  # fmt: skip
    _access.info("%s %s %d", method, path, status, extra={"fields": fields})


def _fail(
    request: web.BaseRequest,
    response: web.StreamResponse | None,
    failure: Refusal,
    own: Mapping[str, str],
    error: BaseException,
) -> web.StreamResponse:
    """An error answer if none has begun; else the connection is cut, so that half an answer
    is never taken for a whole one."""
    if response is None or not response.prepared:
        return failure.response(dict(own))
    _log.warning("answer of %s cut off: %s", own[hop.REPLICA], error or failure.message)
    transport = request.transport
    if transport is not None:
        if request.version < aiohttp.HttpVersion11:
            # The end of the connection is the end of the answer: only a reset says "not whole".
            with suppress(OSError):  # closed already
                transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        transport.abort()
    return response


def _is_websocket(request: web.BaseRequest) -> bool:
    return (
        request.headers.get("Upgrade", "").lower() == "websocket"
        and "upgrade" in request.headers.get("Connection", "").lower()
    )


def _held_bytes(call: _Call) -> int:
    if call.body is not None:
        return len(call.body)
    length = call.request.content_length
    if length is None:
        return _HELD_BODY_BYTES if call.request.body_exists else 0
    return min(length, _HELD_BODY_BYTES)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A large body in pieces, so that sending it does not hold up other requests."""
    for begin in range(0, len(body), _PIECE_BYTES):
        yield body[begin : begin + _PIECE_BYTES]


async def _send_continue(request: web.BaseRequest) -> None:
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # These bytes are no part of the answer that follows.
    request.writer.output_size = 0


async def _read_json(request: web.BaseRequest) -> tuple[dict[str, Any], bytes]:
    """The whole body and what it says.

    Raises:
        Refusal: too large, compressed, or not a JSON object.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, "the body must not be compressed where its model decides; "
                      "send compressed ones to /APP/v1/...", code="bad_request")  # fmt: skip
    if request.headers.get("Expect", "").lower() == "100-continue":
        await _send_continue(request)
    body = bytearray()
    try:
        async with asyncio.timeout(ROUTED_BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > MAX_ROUTED_BODY_BYTES:
                    raise Refusal(413, "the body is too large to look for its model",
                                  code="too_large")  # fmt: skip
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {ROUTED_BODY_S:g} s",
                      code="slow_body") from None  # fmt: skip
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not JSON ({error}); send other kinds to /APP/v1/..."
        ) from error
    if not isinstance(document, dict):
        raise bad_request("the body is not a JSON object")
    return document, bytes(body)
