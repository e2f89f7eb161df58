"""Has snapshots made in the background, on slots that no request wants.

A plain start reports that no snapshot fits the machine yet; then a capture is wanted for that app
definition. One capture runs at a time, gives way at once when a request needs its slot, and is
tried again later. After two failures it is off until the app is deployed anew. Called on the
loop: `tick` once a second, the rest by the fleet.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.contract.node import Node
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    Lease,
    ModelMount,
    StartKind,
    StartReport,
)
from nagara.control.app import App
from nagara.control.occupancy import Use
from nagara.control.service import CaptureStatus, Service
from nagara.control.state import CaptureRecord, State
from nagara.control.supply import Supply
from nagara.control.tasks import surely
from nagara.control.telemetry import Telemetry

MAX_FAILURES = 2

_log = logging.getLogger(__name__)

Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]], str], "asyncio.Task[None]"]


class Captures:
    """Which apps want a snapshot, and the one being made."""

    def __init__(
        self,
        node: Node,
        supply: Supply,
        state: State,
        mounts: Callable[[App], tuple[ModelMount, ...]],
        clock: Clock,
        spawn: Spawn,
        telemetry: Telemetry,
    ) -> None:
        self._node = node
        self._supply = supply
        self._state = state
        self._mounts = mounts
        self._clock = clock
        self._spawn = spawn
        self._telemetry = telemetry
        self._wanted: list[Service] = []
        self._current: tuple[Service, str, asyncio.Task[None]] | None = None
        self._is_cancelled = False

    @property
    def running(self) -> frozenset[str]:
        """The capture replica, if there is one."""
        return frozenset() if self._current is None else frozenset({self._current[1]})

    @property
    def freeing(self) -> int:
        """Slots that a cancelled capture is giving back."""
        return int(self._current is not None and self._is_cancelled)

    async def load(self, service: Service) -> None:
        """What earlier processes have captured of this definition."""
        app = service.app
        status = CaptureStatus()
        for record in await self._state.captures(app.tenant, app.name, app.definition):
            if status.report is None:
                status.report = record.report
            if record.report.snapshot is not None:
                status.state = "done"
                status.report = record.report
                break
            status.failures += record.version == service.version
        if status.failures >= MAX_FAILURES and status.state != "done":
            status.state = "off"
        if app.snapshot and status.report is None and (lack := await self._lack()):
            status.state = "off"
            status.report = CaptureReport(None, lack)
        service.capture = status

    async def _lack(self) -> str | None:
        """Why the machine cannot save any replica, known without trying."""
        try:
            facts = await self._node.facts()
        except NagaraError:  # not reached yet: the first start will tell
            return None
        if facts.can_snapshot:
            return None
        return f"this machine cannot save replicas: {'; '.join(facts.missing)}"

    def started(self, service: Service, app: App, report: StartReport) -> None:
        """Takes note of what a start tells about the app's snapshot."""
        if app.definition != service.app.definition:
            return
        status = service.capture
        if report.kind is StartKind.RESTORED:
            status.state = "done"
            if status.report is None:
                status.report = CaptureReport(snapshot=report.snapshot)
        elif report.capture_wanted:
            if status.failures < MAX_FAILURES and status.state != "running":
                status.state = "wanted"
                if service not in self._wanted:
                    self._wanted.append(service)
        elif status.state == "unknown":
            status.state = "off"

    async def redeployed(self, service: Service, *, is_same: bool) -> None:
        """A new version of the app: failures no longer count, another definition starts anew."""
        self._give_up(service, is_same=is_same)
        await self.load(service)

    async def drop(self, service: Service) -> None:
        """The app is being deleted."""
        current = self._current
        self._give_up(service, is_same=False)
        if current is not None and current[0] is service:
            await asyncio.wait((current[2],))

    def tick(self) -> None:
        """Begins the next capture if a slot is free that nobody waits for."""
        if self._current is not None or not self._wanted:
            return
        lease = self._supply.claim_here(self._wanted[0].app)
        if lease is None:
            return
        service = self._wanted.pop(0)
        name = f"{service.app.name}-capture-{secrets.token_hex(4)}"
        service.capture.state = "running"
        self._is_cancelled = False
        now_s = self._clock.monotonic_s()
        self._telemetry.occupancy.begin(name, service.app.name, Use.CAPTURE, now_s)
        task = self._spawn(partial(self._capture, service, service.app, name, lease), name)
        self._current = (service, name, task)
        task.add_done_callback(partial(self._ended, service, service.app, name, lease))

    def give_way(self) -> bool:
        """Cancels the capture for a request's sake. False if there is none to cancel."""
        if self._current is None or self._is_cancelled:
            return False
        _log.info("%s: gives its slot to a waiting request", self._current[1])
        self._is_cancelled = True
        self._current[2].cancel()
        return True

    async def end(self) -> None:
        """Cancels the capture and waits until it has ended; no other begins."""
        self._wanted.clear()
        if self._current is not None:
            task = self._current[2]
            task.cancel()
            await asyncio.wait((task,))

    def _give_up(self, service: Service, *, is_same: bool) -> None:
        if service in self._wanted and not is_same:
            self._wanted.remove(service)
        if self._current is not None and self._current[0] is service and not is_same:
            self.give_way()

    async def _capture(self, service: Service, app: App, name: str, lease: Lease) -> None:
        await self._supply.durable()
        await self._state.add_replica(name, app, lease, state="starting", purpose="capture")
        _log.info("%s: making a snapshot", name)
        try:
            spec = app.spec(self._mounts(app))
            report = await self._node.capture(CaptureOrder(name, lease, spec))
        except NagaraError as error:
            report = CaptureReport(snapshot=None, reason=_without_secrets(app) + error.what)
        except asyncio.CancelledError:
            await asyncio.shield(self._make_sure(name, "stopped", "gave way"))
            raise
        state = "stopped" if report.snapshot is not None else "failed"
        await self._make_sure(name, state, report.reason)
        outcome = "failed" if report.snapshot is None else "done"
        self._telemetry.metrics.captures.add(app.name, outcome)
        await self._state.add_capture(app, CaptureRecord(name, service.version, report))
        if service.app.definition == app.definition:
            self._note(service.capture, name, report)

    def _note(self, status: CaptureStatus, name: str, report: CaptureReport) -> None:
        status.report = report
        if report.snapshot is not None:
            status.state = "done"
            _log.info("%s: snapshot made in %.1f s", name, report.elapsed_s)
            return
        status.failures += 1
        is_off = status.failures >= MAX_FAILURES
        status.state = "off" if is_off else "failed"
        _log.warning("%s: no snapshot: %s", name, report.reason)

    async def _make_sure(self, name: str, state: str, reason: str | None) -> None:
        """The node has ended a capture replica by itself; only an unreachable one may not have."""
        await surely(partial(self._node.stop, name), f"{name}: cannot be stopped yet", self._clock)
        await self._state.set_replica(name, state, reason)

    def _ended(
        self, service: Service, app: App, name: str, lease: Lease, task: asyncio.Task[None]
    ) -> None:
        self._current = None
        self._telemetry.slot_free(name)
        status = service.capture
        is_same = service.app.definition == app.definition
        if is_same and status.state in ("running", "failed"):
            # Gave way, or failed for the first time: at the end of the queue again.
            status.state = "wanted"
            self._wanted.append(service)
        self._supply.release(lease)


def _without_secrets(app: App) -> str:
    """What may be the reason when a replica that is to be saved does not come up."""
    if not app.secrets or app.rules.with_secrets:
        return ""
    return (
        f"without {', '.join(app.secrets)}, as a replica that is saved is started "
        '(snapshot.secrets = "allow" lets its snapshot hold secrets): '
    )
