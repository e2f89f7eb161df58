"""`/metrics` and `/api/usage`: what control counts. Called by `api`, which has checked who asks."""

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from nagara.base.errors import NagaraError
from nagara.contract.node import Node
from nagara.control.metrics import gauges, series
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
    node: Node

    async def disk(self) -> dict[str, Any]:
        """What the machine keeps by part, its bound, and what went to keep to it. Bytes."""
        report = await self.node.disk()
        return {
            "limit_bytes": report.limit_bytes,
            "parts": dict(report.parts),
            "removed": dict(report.removed),
        }

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


def disk_text(disk: Mapping[str, Any]) -> str:
    """The same in Prometheus's text format."""
    lines = [
        *gauges("nagara_disk_bytes", "What the machine keeps on its disk.", "part", disk["parts"]),
        *series(
            "nagara_disk_removed_bytes_total", "What went to keep to the disk budget.", "counter",
            ("kind",), (((kind,), size) for kind, size in disk["removed"].items()),
        ),
    ]  # fmt: skip
    if disk["limit_bytes"] is not None:
        lines.append("# HELP nagara_disk_budget_bytes The bound of what the machine keeps.")
        lines.append("# TYPE nagara_disk_budget_bytes gauge")
        lines.append(f"nagara_disk_budget_bytes {disk['limit_bytes']}")
    return "".join(f"{line}\n" for line in lines)


class FiguresApi:
    """Both over HTTP."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self.routes: tuple[tuple[str, re.Pattern[str], _Handler], ...] = (
            ("GET", re.compile(r"/metrics"), self._metrics),
            ("GET", re.compile(r"/api/usage"), self._usage),
            ("GET", re.compile(r"/api/disk"), self._disk),
        )

    async def _metrics(self, request: web.BaseRequest, arguments: dict[str, str]) -> web.Response:
        """All figures in Prometheus's text format."""
        text = self._figures.text()
        with suppress(NagaraError):  # the machine does not answer: its figures are missing
            text += disk_text(await self._figures.disk())
        return web.Response(text=text, content_type="text/plain")

    async def _disk(self, request: web.BaseRequest, arguments: dict[str, str]) -> web.Response:
        """`{"limit_bytes", "parts": {NAME: bytes}, "removed": {KIND: bytes}}` of this machine."""
        return web.json_response(await self._figures.disk())

    async def _usage(self, request: web.BaseRequest, arguments: dict[str, str]) -> web.Response:
        """`{"apps": {NAME: {"seconds": {USE: s}, "allocation_utilisation"}}, "all": ...}`."""
        return web.json_response(self._figures.usage())
