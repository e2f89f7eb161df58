"""The routes below `/api/pool`: what the pool holds, plans and thinks, and a person's orders.

Called by `api`, which has checked who asks.
"""

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from nagara.base.errors import UsageError
from nagara.contract.machine import CheckKind
from nagara.control.refusal import bad_request, not_found
from nagara.pool.errors import IllegalEventError, UnknownMachineError
from nagara.pool.service import PoolService

_Arguments = dict[str, str]
_Handler = Callable[[web.BaseRequest, _Arguments], Awaitable[web.Response]]


class PoolApi:
    """The pool over HTTP."""

    def __init__(self, pool: PoolService) -> None:
        self._pool = pool
        machine = r"/api/pool/machines/(?P<name>[A-Za-z0-9._-]+)"
        self.routes: tuple[tuple[str, re.Pattern[str], _Handler], ...] = (
            ("GET", re.compile(r"/api/pool"), self._status),
            ("GET", re.compile(r"/api/pool/plan"), self._plan),
            ("POST", re.compile(machine + r"/drain"), self._drain),
            ("POST", re.compile(machine + r"/resume"), self._resume),
            ("POST", re.compile(machine + r"/diagnose"), self._diagnose),
        )

    async def _status(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"pool", "machines": [...], "alerts": [...], level, target, ...}`."""
        document, ago = self._pool.document(), self._pool.heard_ago()
        for machine in document["machines"]:
            machine["heard_ago_s"] = ago[machine["name"]]
        return web.json_response(document)

    async def _plan(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """The latest plan; `words` explains it."""
        return web.json_response(self._pool.plan_document())

    async def _drain(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """No new leases there. `{"machine", "state"}`."""
        return await self._order(arguments["name"], self._pool.drain(arguments["name"]))

    async def _resume(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """Back into use. `{"machine", "state"}`."""
        return await self._order(arguments["name"], self._pool.resume(arguments["name"]))

    async def _diagnose(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`?kind=medium` or `heavy`: once it is empty it is looked at. `{"machine", "state"}`."""
        kind = request.query.get("kind", CheckKind.MEDIUM)
        if kind not in (CheckKind.MEDIUM, CheckKind.HEAVY):
            raise bad_request("kind must be medium or heavy")
        work = self._pool.diagnose(arguments["name"], CheckKind(kind))
        return await self._order(arguments["name"], work)

    async def _order(self, name: str, work: Awaitable[None]) -> web.Response:
        try:
            await work
        except UnknownMachineError as error:
            raise not_found(error.what) from error
        except IllegalEventError as error:
            raise UsageError(str(error), where=name) from error
        machine = self._pool.core.table.get(name)
        state = None if machine is None else machine.state
        return web.json_response({"machine": name, "state": state})
