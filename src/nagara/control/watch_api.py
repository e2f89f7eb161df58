"""The routes by which people watch: what goes on now, and what was recorded.

Called by `api`, which has checked who asks.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from aiohttp import web

from nagara.contract.node import Node
from nagara.control.history import MAX_ROWS, PAGE_ROWS, UNUSED
from nagara.control.live import Live
from nagara.control.refusal import bad_request

_Arguments = dict[str, str]
_Handler = Callable[[web.BaseRequest, _Arguments], Awaitable[web.StreamResponse]]


class WatchApi:
    """Watching over HTTP."""

    def __init__(self, live: Live, node: Node) -> None:
        self._live = live
        self._node = node
        app = r"/api/apps/(?P<app>[a-z0-9-]+)"
        self.routes: tuple[tuple[str, re.Pattern[str], _Handler], ...] = (
            ("GET", re.compile(r"/api/events"), self._events),
            ("GET", re.compile(r"/api/starts"), self._starts),
            ("GET", re.compile(r"/api/captures"), self._captures),
            ("GET", re.compile(r"/api/snapshots"), self._snapshots),
            ("GET", re.compile(app + r"/replicas"), self._replicas),
        )

    async def _events(self, request: web.BaseRequest, arguments: _Arguments) -> web.StreamResponse:
        """Server-sent events: `hello` with everything, then each second what has changed.

        `hello`: `{"apps", "starts", "pool", "samples"}`; then `apps`: `{"changed", "gone"}`,
        `starts`: a list, `pool`, and `sample`: the rates of the last second.
        """
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for event in self._live.listen():
            await response.write(event)
        await response.write_eof()
        return response

    async def _starts(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"starts": [...]}` of all apps, the latest first, as in a trace and with `id` and `app`.

        `?app=` narrows to one, `?before=` goes on from an `id`, `?limit=` is 1 to 1000.
        """
        starts = await self._live.history.starts(
            app=request.query.get("app"),
            before=_number(request, "before", None, 2**62),
            limit=_number(request, "limit", PAGE_ROWS, MAX_ROWS) or PAGE_ROWS,
        )
        return web.json_response({"starts": starts})

    async def _captures(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"captures": [...]}`: attempts to make snapshots, the latest first; `?app=` narrows.

        `is_present` says that it is of the app as it is defined now.
        """
        captures = await self._live.history.captures(request.query.get("app"))
        return web.json_response({"captures": captures})

    async def _snapshots(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"snapshots": [...]}` of all machines, the newest first; `?app=` narrows to one app.

        Each is one variant: what a host must offer (`cpu_flags`), how it stands with it (`state`,
        `reasons`, `misfit`, `failures` in a row), its sizes, and what the recorded starts say of
        it: `restores`, `restored_s` in the mean, `failed_restores`. `is_present` says whether it
        is of the app as it is defined now; null where that is not known.
        """
        app = request.query.get("app")
        saved = [one for one in await self._node.snapshots() if app in (None, one.app)]
        uses = await self._live.history.snapshot_uses()
        rows = [
            {**asdict(one), **uses.get((one.tenant, one.app, one.snapshot), UNUSED)}
            for one in sorted(saved, key=lambda one: -one.created_at_s)
        ]
        return web.json_response({"snapshots": rows})

    async def _replicas(self, request: web.BaseRequest, arguments: _Arguments) -> web.Response:
        """`{"replicas": [...]}`: the app's latest, living and ended, with `state` and `reason`."""
        return web.json_response({"replicas": await self._live.history.replicas(arguments["app"])})


def _number(request: web.BaseRequest, name: str, default: int | None, most: int) -> int | None:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not 0 < int(text) <= most:
        raise bad_request(f"{name} must be between 1 and {most}")
    return int(text)
