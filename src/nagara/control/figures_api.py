"""`/metrics` and `/api/usage`: what control counts. Called by `api`, which has checked who asks."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from nagara.control.occupancy import Use, utilisation
from nagara.control.service import Service
from nagara.control.telemetry import Telemetry, total
from nagara.pool.figures import machine_metrics, metrics
from nagara.pool.service import PoolService

_Handler = Callable[[web.BaseRequest, dict[str, str]], Awaitable[web.Response]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Where the figures come from."""

    telemetry: Telemetry
    services: Mapping[str, Service]
    pool: PoolService

    def text(self) -> str:
        """Prometheus's text format."""
        own = self.telemetry.text(self.services.values())
        return own + metrics(self.pool.figures()) + machine_metrics(self.pool.core.table)

    def usage(self) -> dict[str, Any]:
        """Reserved seconds by use for each app and all, with the busy share of them."""
        spent_s = self.telemetry.spent_s()
        apps = {app: _document(uses) for app, uses in sorted(spent_s.items())}
        return {"apps": apps, "all": _document(total(spent_s))}


def _document(uses: Mapping[Use, float]) -> dict[str, Any]:
    share = utilisation(uses)
    return {
        "seconds": {use.value: round(uses.get(use, 0.0), 3) for use in Use},
        "allocation_utilisation": None if share is None else round(share, 4),
    }


class FiguresApi:
    """Both over HTTP."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self.routes: tuple[tuple[str, re.Pattern[str], _Handler], ...] = (
            ("GET", re.compile(r"/metrics"), self._metrics),
            ("GET", re.compile(r"/api/usage"), self._usage),
        )

    async def _metrics(self, request: web.BaseRequest, arguments: dict[str, str]) -> web.Response:
        """All figures in Prometheus's text format."""
        return web.Response(text=self._figures.text(), content_type="text/plain")

    async def _usage(self, request: web.BaseRequest, arguments: dict[str, str]) -> web.Response:
        """`{"apps": {NAME: {"seconds": {USE: s}, "allocation_utilisation"}}, "all": ...}`."""
        return web.json_response(self._figures.usage())
