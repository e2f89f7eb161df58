"""The admin API: what `nagara deploy`, `apps`, `logs`, `trace` and `delete` talk to.

JSON over HTTP below `/api/`, called by the web server, one task per request. Every route needs
the admin token; there is one table of routes and one place that checks. The documents it answers
with are described at the functions that make them.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from nagara.base.errors import NagaraError, UsageError
from nagara.contract.node import Node, NodeUnavailableError, ReplicaGoneError
from nagara.control import openapi
from nagara.control.app_images import with_images
from nagara.control.appfile import parse_apps
from nagara.control.auth import Auth, bearer
from nagara.control.deployments import Deployments
from nagara.control.errors import UnknownAppError
from nagara.control.figures_api import Figures, FiguresApi
from nagara.control.fleet import Fleet
from nagara.control.key_limits import KeyLimits, limits_from
from nagara.control.pool_api import PoolApi
from nagara.control.refusal import Refusal, bad_request, not_found, unauthorised
from nagara.control.replicas import ReplicaState
from nagara.control.service import Service
from nagara.control.state import KeyRecord, State
from nagara.control.watch_api import WatchApi
from nagara.pool.service import PoolService

MAX_APP_FILE_BYTES = 2**20
MAX_LOG_BYTES = 16 * 2**20
BODY_S = 60.0  # how long an app file may take to come

_log = logging.getLogger(__name__)

_Arguments = dict[str, str]
_Handler = Callable[[web.BaseRequest, _Arguments], Awaitable[web.StreamResponse]]


class Api:
    """The routes below `/api/`."""

    def __init__(
        self,
        deployments: Deployments,
        fleet: Fleet,
        node: Node,
        state: State,
        auth: Auth,
        pool: PoolService,
        figures: Figures,
        watch: WatchApi,
    ) -> None:
        self._deployments = deployments
        self._fleet = fleet
        self._node = node
        self._state = state
        self._auth = auth
        app = r"/api/apps/(?P<app>[a-z0-9-]+)"
        self.routes: tuple[tuple[str, re.Pattern[str], _Handler], ...] = (
            ("GET", re.compile(r"/api/status"), self._status),
            ("GET", re.compile(r"/api/openapi"), self._openapi),
            ("PUT", re.compile(r"/api/apps"), self._deploy),
            ("GET", re.compile(r"/api/apps"), self._list),
            ("GET", re.compile(app), self._show),
            ("DELETE", re.compile(app), self._delete),
            ("POST", re.compile(app + r"/fold"), self._fold),
            ("GET", re.compile(app + r"/versions"), self._versions),
            ("POST", re.compile(app + r"/rollback"), self._rollback),
            ("GET", re.compile(app + r"/logs"), self._logs),
            ("GET", re.compile(r"/api/trace/(?P<name>[a-z0-9-]+)"), self._trace),
            ("GET", re.compile(r"/api/keys"), self._keys),
            ("POST", re.compile(r"/api/keys"), self._add_key),
            ("DELETE", re.compile(r"/api/keys/(?P<id>[0-9a-f]+)"), self._delete_key),
            ("GET", re.compile(r"/api/tenants"), self._tenants),
            ("PUT", re.compile(r"/api/tenants/(?P<tenant>[a-z0-9-]{1,40})"), self._bound_tenant),
            *PoolApi(pool).routes,
            *watch.routes,
            *FiguresApi(figures).routes,
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request below `/api/`."""
        try:
            if not self._auth.is_admin(bearer(request.headers.get("Authorization"))):
                raise unauthorised("the admin token (Authorization: Bearer TOKEN)")
            return await self._dispatch(request)
        except Refusal as refusal:
            return refusal.response()
        except NodeUnavailableError as error:
            return _error_response(503, error)
        except NagaraError as error:
            is_usage = error.exit_code == UsageError.exit_code
            return _error_response(400 if is_usage else 500, error)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        is_known = False
        for method, pattern, handler in self.routes:
            match = pattern.fullmatch(path)
            if match is not None:
                is_known = True
                if method == request.method:
                    return await handler(request, match.groupdict())
        if is_known:
            raise Refusal(405, f"{request.method} is not served here", code="method_not_allowed")
        raise not_found(f"no such API path: {path}")

    # -- apps ------------------------------------------------------------------------------

    async def _status(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"machine", "isolation", "can_snapshot", "missing", ...}`: the node's facts."""
        return web.json_response(asdict(await self._node.facts()))

    async def _openapi(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """This API as an OpenAPI document."""
        return web.json_response(openapi.document(self.routes))

    async def _deploy(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """The body is an app file; `?file=` names it in messages. `{"apps": [...]}`.

        All apps are checked before the first is taken into use.
        """
        body = await _read(request, MAX_APP_FILE_BYTES)
        file = request.query.get("file", "app file")
        try:
            apps = parse_apps(body.decode(), file)
        except UnicodeDecodeError as error:
            raise bad_request(f"{file} is not UTF-8 text") from error
        named = [(app, self._fleet.mounts(app)) for app in apps]
        apps_now = await with_images(self._node, named)
        services = [await self._deployments.deploy(app) for app in apps_now]
        return web.json_response({"apps": [_describe(service) for service in services]})

    async def _list(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"apps": [...]}`: each with replicas by state, requests, capture, last failure."""
        apps = [_describe(service) for service in self._fleet.services.values()]
        return web.json_response({"apps": apps})

    async def _show(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """One app: its definition, replicas by state, requests, capture, last failure."""
        return web.json_response(_describe(self._service(arguments["app"])))

    async def _delete(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """Returns when the app's replicas have ended. `{"deleted": NAME}`."""
        service = self._service(arguments["app"])
        await self._deployments.delete(service)
        return web.json_response({"deleted": service.app.name})

    async def _fold(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """Ends the app's present replicas and returns when they have ended."""
        service = self._service(arguments["app"])
        folded = len(service.replicas)
        await self._deployments.fold(service)
        return web.json_response({"folded": folded})

    async def _versions(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"versions": [{"version", "definition", "deployed_s", "is_present"}]}`, newest first."""
        service = self._service(arguments["app"])
        documents = [
            {
                "version": one.number, "definition": one.app.definition,
                "deployed_s": one.deployed_s, "is_present": one.number == service.version,
            }
            for one in await self._deployments.versions(service)
        ]  # fmt: skip
        return web.json_response({"versions": documents})

    async def _rollback(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`?to=` a version, by default the one before the present one. The app after it."""
        service = self._service(arguments["app"])
        to = request.query.get("to")
        if to is not None and not (to.isascii() and to.isdigit() and len(to) < 10):
            raise bad_request("to must be the number of a version")
        try:
            rolled = await self._deployments.rollback(service, None if to is None else int(to))
        except UnknownAppError as error:
            raise not_found(f"{error.what}; {error.hint}") from error
        return web.json_response(_describe(rolled))

    # -- history ---------------------------------------------------------------------------

    async def _logs(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """Plain text: the end of what one replica wrote; `x-nagara-replica` says which.

        `?replica=` chooses, otherwise it is the newest that has a log; `?tail_bytes=`.
        """
        service = self._service(arguments["app"])
        tail = request.query.get("tail_bytes", "65536")
        if not tail.isdigit() or not 0 < int(tail) <= MAX_LOG_BYTES:
            raise bad_request(f"tail_bytes must be between 1 and {MAX_LOG_BYTES}")
        rows = await self._state.replicas(service.app.tenant, service.app.name)
        names = [str(row["replica"]) for row in rows if row["purpose"] == "serve"]
        chosen = request.query.get("replica")
        if chosen is not None:
            if chosen not in {str(row["replica"]) for row in rows}:
                raise not_found(f"{service.app.name} has no replica {chosen!r}")
            names = [chosen]
        for name in names:
            try:
                text = await self._node.logs(name, tail_bytes=int(tail))
            except ReplicaGoneError:
                continue
            return web.Response(
                body=text, content_type="text/plain", charset="utf-8",
                headers={"x-nagara-replica": name},
            )  # fmt: skip
        raise not_found(f"no log of {chosen or service.app.name} is kept")

    async def _trace(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"app", "starts": [...]}`, newest first; `name` is an app or a replica.

        A start: `replica, kind, stages (seconds, with unaccounted), total_s, started_s,
        fallback, snapshot, error, files, host (of a restored one, as in `StartReport`)`.
        """
        name = arguments["name"]
        replica = None
        service = self._fleet.services.get(name)
        if service is not None:
            owner = (service.app.tenant, service.app.name)
        else:
            found = await self._state.app_of(name)
            if found is None:
                raise not_found(f"no app and no replica is called {name!r}")
            owner, replica = found, name
        starts = await self._state.starts(*owner, replica=replica)
        documents = [{**asdict(start), "stages": dict(start.stages)} for start in starts]
        return web.json_response({"app": owner[1], "starts": documents})

    # -- keys ------------------------------------------------------------------------------

    async def _keys(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"keys": [{"id", "name", "created_s"}]}`: never their texts."""
        return web.json_response({"keys": [_describe_key(key) for key in self._auth.listing()]})

    async def _add_key(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`?name=&apps=&per_minute=&concurrency=`; the key's text comes this once, as `key`."""
        limits = limits_from(request.query)
        record, key = await self._auth.create(request.query.get("name", ""), limits)
        return web.json_response({**_describe_key(record), "key": key})

    async def _delete_key(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """The key is refused from now on."""
        if not await self._auth.delete(arguments["id"]):
            raise not_found(f"no key {arguments['id']!r}")
        return web.json_response({"deleted": arguments["id"]})

    async def _tenants(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"tenants": {NAME: {"per_minute", "concurrency"}}}`: the bounds of all their keys."""
        tenants = {name: _bounds(limits) for name, limits in self._auth.tenants().items()}
        return web.json_response({"tenants": tenants})

    async def _bound_tenant(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`?per_minute=&concurrency=`: bounds for all keys of the tenant together."""
        limits = limits_from({k: v for k, v in request.query.items() if k != "apps"})
        await self._auth.bound(arguments["tenant"], limits)
        return web.json_response({arguments["tenant"]: _bounds(limits)})

    def _service(self, name: str) -> Service:
        service = self._fleet.services.get(name)
        if service is None:
            raise not_found(f"no app {name!r} is deployed")
        return service


def _describe(service: Service) -> dict[str, Any]:
    """An app: name, version, definition, replicas by state, requests, capture, last failure."""
    app, capture = service.app, service.capture
    report = capture.report
    return {
        "name": app.name,
        "version": service.version,
        "definition": app.definition,
        "outdated": sum(not service.is_current(one) for one in service.replicas.values()),
        "replicas": {
            state.value: service.count(state)
            for state in (
                ReplicaState.STARTING, ReplicaState.READY,
                ReplicaState.DRAINING, ReplicaState.STOPPING,
            )
        },
        "scale": {"min": app.scale.min, "max": app.scale.max},
        "running": service.dispatcher.demand.now - service.dispatcher.held,
        "held": service.dispatcher.held,
        "failures": service.failures.count,
        "last_failure": service.failures.reason or None,
        "capture": {
            "state": capture.state,
            "failures": capture.failures,
            **({} if report is None else asdict(report)),
        },
    }  # fmt: skip


def _bounds(limits: KeyLimits) -> dict[str, int | None]:
    return {"per_minute": limits.per_minute, "concurrency": limits.concurrency}


def _describe_key(key: KeyRecord) -> dict[str, Any]:
    return {
        "id": key.id, "name": key.name, "created_s": key.created_s,
        "limits": key.limits.document(),
    }  # fmt: skip


def _error_response(status: int, error: NagaraError) -> web.Response:
    if status >= 500:
        _log.warning("%s", error)
    kind = "usage" if status < 500 else "server"
    document = {"message": error.what, "type": kind, "param": error.where, "code": kind}
    return web.json_response({"error": {**document, "hint": error.hint}}, status=status)


async def _read(request: web.BaseRequest, limit_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limit_bytes:
                    raise Refusal(413, f"more than {limit_bytes} bytes", code="too_large")
    except TimeoutError:
        raise Refusal(408, "the body did not come in time", code="slow_body") from None
    return bytes(body)
