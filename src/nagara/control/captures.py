"""Has snapshots made in the background, on slots that no request wants.

A plain start reports that no snapshot fits the machine yet; then a capture is wanted for that app
definition and for all machines that could use it (its *scope*), and made by one of them. One
capture runs at a time, gives way at once when a request needs its slot, and is tried again later.
After two failures it is off until the app is deployed anew. Called on the loop: `tick` once a
second, the rest by the fleet.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from nagara.control.zone import OWN

MAX_FAILURES = 2

_log = logging.getLogger(__name__)

Key = tuple[str, str, str]  # app, definition, scope
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]], str], "asyncio.Task[None]"]


class Scopes(Protocol):
    """Which machines can use each other's snapshots."""

    def capture_scope(self, lease: Lease, image: str) -> tuple[str, str]:
        """The machine of a lease, and the name of its scope for such an image."""
        ...

    def machines_of(self, scope: str) -> list[str]:
        """The machines of a scope."""
        ...


class OneMachine:
    """There is only this one."""

    def capture_scope(self, lease: Lease, image: str) -> tuple[str, str]:
        return OWN, OWN

    def machines_of(self, scope: str) -> list[str]:
        return [OWN]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A capture that is to be made.

    `is_first`: the app has no snapshot yet, so its status tells of this one.
    """

    service: Service
    definition: str
    scope: str
    machine: str  # that has asked for it
    is_first: bool

    @property
    def key(self) -> Key:
        return self.service.app.name, self.definition, self.scope


@dataclass(frozen=True, slots=True)
class _Making:
    wanted: _Wanted
    app: App
    name: str
    machine: str
    lease: Lease


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
        scopes: Scopes | None = None,
    ) -> None:
        self._node = node
        self._scopes = scopes or OneMachine()
        self._supply = supply
        self._state = state
        self._mounts = mounts
        self._clock = clock
        self._spawn = spawn
        self._telemetry = telemetry
        self._wanted: list[_Wanted] = []
        self._current: tuple[_Making, asyncio.Task[None]] | None = None
        self._made: dict[Key, str] = {}  # on which machine
        self._failed: Counter[Key] = Counter()  # of those that are not an app's first
        self._is_cancelled = False

    @property
    def running(self) -> frozenset[str]:
        """The capture replica, if there is one."""
        return frozenset() if self._current is None else frozenset({self._current[0].name})

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

    def started(self, service: Service, app: App, report: StartReport, lease: Lease | None) -> None:
        """Takes note of what a start under the lease tells about the app's snapshot."""
        if app.definition != service.app.definition or lease is None:
            return
        status = service.capture
        if report.kind is StartKind.RESTORED:
            status.state = "done"
            if status.report is None:
                status.report = CaptureReport(snapshot=report.snapshot)
        elif report.capture_wanted:
            self._want(service, *self._scopes.capture_scope(lease, app.image))
        elif status.state == "unknown":
            status.state = "off"

    def _want(self, service: Service, machine: str, scope: str) -> None:
        status = service.capture
        is_first = status.state != "done" or machine == OWN
        wanted = _Wanted(service, service.app.definition, scope, machine, is_first)
        # What another machine of the scope has made comes to this one: it need not make its own.
        if self._made.get(wanted.key, machine) != machine or self._is_off(wanted):
            return
        if self._current is not None and self._current[0].wanted.key == wanted.key:
            return
        if wanted.is_first:
            status.state = "wanted"
        if wanted.key not in (one.key for one in self._wanted):
            self._wanted.append(wanted)

    def _is_off(self, wanted: _Wanted) -> bool:
        failures = wanted.service.capture.failures if wanted.is_first else self._failed[wanted.key]
        return failures >= MAX_FAILURES

    async def redeployed(self, service: Service, *, is_same: bool) -> None:
        """A new version of the app: failures no longer count, another definition starts anew."""
        self._give_up(service, is_same=is_same)
        await self.load(service)

    async def drop(self, service: Service) -> None:
        """The app is being deleted."""
        current = self._current
        self._give_up(service, is_same=False)
        if current is not None and current[0].wanted.service is service:
            await asyncio.wait((current[1],))
        self._wanted = [one for one in self._wanted if one.service is not service]

    def tick(self) -> None:
        """Begins the next capture if a slot is free that nobody waits for."""
        if self._current is not None:
            return
        for wanted in self._wanted:
            found = self._slot_for(wanted)
            if found is not None:
                self._wanted.remove(wanted)
                self._begin(wanted, *found)
                return

    def _slot_for(self, wanted: _Wanted) -> tuple[str, Lease] | None:
        """On the machine that asked, or another one of the scope."""
        others = self._scopes.machines_of(wanted.scope)
        for machine in dict.fromkeys((wanted.machine, *others)):
            lease = self._supply.claim_spare(wanted.service.app, machine)
            if lease is not None:
                return machine, lease
        return None

    def _begin(self, wanted: _Wanted, machine: str, lease: Lease) -> None:
        app = wanted.service.app
        making = _Making(wanted, app, f"{app.name}-capture-{secrets.token_hex(4)}", machine, lease)
        self._made.pop(wanted.key, None)
        if wanted.is_first:
            wanted.service.capture.state = "running"
        self._is_cancelled = False
        now_s = self._clock.monotonic_s()
        self._telemetry.occupancy.begin(making.name, app.name, Use.CAPTURE, now_s)
        task = self._spawn(partial(self._capture, making), making.name)
        self._current = (making, task)
        task.add_done_callback(partial(self._ended, making))

    def give_way(self) -> bool:
        """Cancels the capture for a request's sake. False if there is none to cancel."""
        if self._current is None or self._is_cancelled:
            return False
        _log.info("%s: gives its slot to a waiting request", self._current[0].name)
        self._is_cancelled = True
        self._current[1].cancel()
        return True

    async def end(self) -> None:
        """Cancels the capture and waits until it has ended; no other begins."""
        self._wanted.clear()
        if self._current is not None:
            task = self._current[1]
            task.cancel()
            await asyncio.wait((task,))

    def _give_up(self, service: Service, *, is_same: bool) -> None:
        for counted in [key for key in self._failed if key[0] == service.app.name]:
            del self._failed[counted]
        if is_same:
            return
        self._wanted = [one for one in self._wanted if one.service is not service]
        if self._current is not None and self._current[0].wanted.service is service:
            self.give_way()

    async def _capture(self, making: _Making) -> None:
        app, name, lease = making.app, making.name, making.lease
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
        service = making.wanted.service
        await self._state.add_capture(app, CaptureRecord(name, service.version, report))
        if service.app.definition == app.definition:
            self._note(making, report)

    def _note(self, making: _Making, report: CaptureReport) -> None:
        wanted, name, status = making.wanted, making.name, making.wanted.service.capture
        if report.snapshot is not None:
            self._made[wanted.key] = making.machine
            _log.info("%s: snapshot made in %.1f s", name, report.elapsed_s)
        if not wanted.is_first:
            self._failed[wanted.key] += report.snapshot is None
            if report.snapshot is None:
                _log.warning("%s: no snapshot for %s: %s", name, making.machine, report.reason)
            return
        status.report = report
        if report.snapshot is not None:
            status.state = "done"
            return
        status.failures += 1
        is_off = status.failures >= MAX_FAILURES
        status.state = "off" if is_off else "failed"
        _log.warning("%s: no snapshot: %s", name, report.reason)

    async def _make_sure(self, name: str, state: str, reason: str | None) -> None:
        """The node has ended a capture replica by itself; only an unreachable one may not have."""
        await surely(partial(self._node.stop, name), f"{name}: cannot be stopped yet", self._clock)
        await self._state.set_replica(name, state, reason)

    def _ended(self, making: _Making, task: asyncio.Task[None]) -> None:
        self._current = None
        self._telemetry.slot_free(making.name)
        wanted = making.wanted
        is_same = wanted.service.app.definition == making.app.definition
        if is_same and wanted.key not in self._made and not self._is_off(wanted):
            # Gave way, or failed for the first time: at the end of the queue again.
            if wanted.is_first:
                wanted.service.capture.state = "wanted"
            self._wanted.append(wanted)
        self._supply.release(making.lease)


def _without_secrets(app: App) -> str:
    """What may be the reason when a replica that is to be saved does not come up."""
    if not app.secrets or app.rules.with_secrets:
        return ""
    return (
        f"without {', '.join(app.secrets)}, as a replica that is saved is started "
        '(snapshot.secrets = "allow" lets its snapshot hold secrets): '
    )
