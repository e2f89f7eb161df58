"""Starts, routes, drains and ends replicas.

Owns one task per change of a replica's life; all run on the loop, in one `TaskGroup`. It decides
neither how many replicas there should be (`scaling`) nor who answers a request (`dispatch`);
what the node reports comes from `nodewatch`.

A start in order:  decide ─ claim a slot ─ record ─ Node.start ─ route ─ held requests go out
An end in order:   take the route away ─ last request ends ─ Node.stop confirmed ─ free the slot
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.base.spans import Waterfall
from nagara.contract.node import Node, NodeUnavailableError
from nagara.contract.replica import ModelMount, ReplicaStatus, StartKind, StartOrder, StartReport
from nagara.control.app import App
from nagara.control.autoscaler import after_restart
from nagara.control.captures import Captures, Scopes
from nagara.control.dispatch import Dispatcher, Endpoint
from nagara.control.draining import Draining
from nagara.control.lending import Lending
from nagara.control.occupancy import Use
from nagara.control.refusal import Refusal
from nagara.control.replicas import Replica, ReplicaEvent, ReplicaState
from nagara.control.rollout import give_way, roll
from nagara.control.service import SHORT_PAUSE_S, Service, longest_idle
from nagara.control.start_record import failed, succeeded
from nagara.control.state import StartRecord, State
from nagara.control.strain import Strain
from nagara.control.supply import NoSupplyError, Supply
from nagara.control.tasks import Tasks, surely
from nagara.control.telemetry import Telemetry, started
from nagara.control.tracing import Started
from nagara.control.upstream import Upstream
from nagara.pool.actions import Lost
from nagara.pool.lease import same_grant

_REASON_CHARS = 2000

_log = logging.getLogger(__name__)
_S = ReplicaState


class Fleet:
    """All replicas of all apps.

    Args:
        models: finds a model of this machine by name; must be quick; raises `NagaraError`.
    """

    def __init__(
        self,
        node: Node,
        lending: Lending,
        state: State,
        models: Callable[[str], ModelMount],
        clock: Clock,
        tasks: Tasks,
        telemetry: Telemetry,
        scopes: Scopes | None = None,
    ) -> None:
        self.services: dict[str, Service] = {}
        self.strain = Strain()
        self._node = node
        self._state = state
        self._models = models
        self._clock = clock
        self._tasks = tasks
        self._telemetry = telemetry
        self._supply = Supply(lending, self._freeing, self._make_room)
        self.hand_on = self._supply.hand_on  # slots may have become free
        self._lending = lending
        self.captures = Captures(
            *(node, self._supply, state, self.mounts, clock, tasks.spawn, telemetry), scopes=scopes
        )
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._all: dict[str, tuple[Service, Replica]] = {}
        self._draining = Draining()
        self._stopping: set[str] = set()

    # -- life of the fleet -----------------------------------------------------------------

    async def end(self, *, keep: bool, drain_s: float) -> None:
        """Folds everything, or with `keep` leaves ready replicas to a later process.

        Requests still running after `drain_s` are cut off. Ends all tasks of the fleet.
        """
        services = list(self.services.values())
        for service in services:
            for name in list(service.replicas):
                self.cancel(service, name)
                if not keep:
                    self.drain(service, name)
        if keep:
            await self._quiet(drain_s)
        cutting = asyncio.get_running_loop().call_later(drain_s, self._draining.cut_all)
        await self.captures.end()
        for service in services:
            if not keep:
                await self.end_replicas(service, keep_starts=False)
        cutting.cancel()
        await self._tasks.end()
        for service in services:
            for endpoint in list(service.dispatcher.endpoints.values()):
                await endpoint.upstream.close()

    async def _quiet(self, limit_s: float) -> None:
        """Waits until no request runs, `limit_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(  # noqa: ASYNC110 - polled only while control stops
                    service.dispatcher.demand.now for service in self.services.values()
                ):
                    await asyncio.sleep(0.02)

    # -- apps ------------------------------------------------------------------------------

    def add(self, app: App, version: int) -> Service:
        """An app that was not deployed until now."""
        service: Service
        want, failed = (lambda: self._want(service)), (lambda: service.failures.reason)
        dispatcher = Dispatcher(self._clock, want, lambda: service.queue_s(), failed)
        service = Service(app, version, dispatcher, strain=self.strain)
        self.services[app.name] = service
        self.expect(app)
        return service

    def expect(self, app: App) -> None:
        """The app's replicas will want slots."""
        self._lending.expect(app)

    def forget(self, app: str) -> None:
        """The app is gone."""
        self._telemetry.occupancy.forget(app)

    def roll(self, service: Service) -> None:
        """One step from an earlier version's replicas to those of the present one."""
        now_s = self._clock.monotonic_s()
        step = roll(service.roll_target, *service.current(), service.outdated(now_s))
        for name in step.drain:
            self.drain(service, name)
        if service.failures.left_s(now_s) <= 0:
            for _ in range(step.start if not service.failures.count else min(1, step.start)):
                self.start(service)

    async def end_replicas(self, service: Service, *, keep_starts: bool) -> None:
        """Drains and ends the app's replicas; returns when they have gone."""
        kept = {
            name
            for name, replica in service.replicas.items()
            if keep_starts and replica.state is _S.STARTING
        }
        names = service.replicas.keys() - kept
        for name in names:
            self.cancel(service, name)
            self.drain(service, name)
        while names & service.replicas.keys():
            service.gone.clear()
            await service.gone.wait()

    def mounts(self, app: App) -> tuple[ModelMount, ...]:
        """The app's models as this machine has them; raises `NagaraError` for a missing one."""
        return tuple(self._models(name) for name in app.models)

    # -- orders ----------------------------------------------------------------------------

    def start(self, service: Service) -> None:
        """Begins the start of one replica."""
        replica = Replica(f"{service.app.name}-{secrets.token_hex(4)}", service.app)
        self._register(service, replica)
        task = self._tasks.spawn(partial(self._start, service, replica), f"start {replica.name}")
        self._starts[replica.name] = task
        task.add_done_callback(partial(self._start_ended, service, replica))

    def _register(self, service: Service, replica: Replica) -> None:
        service.replicas[replica.name] = replica
        self._all[replica.name] = (service, replica)

    def cancel(self, service: Service, name: str) -> None:
        """Gives up a start."""
        replica = service.replicas[name]
        if replica.state is _S.STARTING:
            replica.on(ReplicaEvent.CANCEL)
            self._starts[name].cancel()

    def drain(self, service: Service, name: str) -> None:
        """Takes a ready replica's route away at once and ends it after its last request."""
        replica = service.replicas[name]
        if replica.state is _S.READY:
            replica.on(ReplicaEvent.DRAIN)
            endpoint = service.dispatcher.remove(name)
            if endpoint is not None and not endpoint.running:
                self._telemetry.slot_turned(service, replica, is_busy=False)
            self._tasks.spawn(partial(self._retire, service, replica, endpoint), f"drain {name}")

    def broken(self, app: str, name: str, reason: str) -> None:
        """A ready replica cannot be reached: replace it."""
        service = self.services.get(app)
        replica = service.replicas.get(name) if service is not None else None
        if service is not None and replica is not None and replica.state is _S.READY:
            self._note_early_end(service, name, f"{name}: {reason}")
            self.drain(service, name)
            self.nudge(service)

    # -- starting --------------------------------------------------------------------------

    def _want(self, service: Service) -> Refusal | None:
        """A request is about to be held: enough replicas must be coming, or say why none can."""
        now_s = self._clock.monotonic_s()
        if service.is_coming:
            for _ in range(service.starts_at_once(now_s)):
                self.start(service)
            return None
        left_s = service.failures.left_s(now_s)
        if left_s > 0:
            return service.cannot_start(left_s)
        if now_s >= service.short_until_s:
            self.start(service)
        return None

    def nudge(self, service: Service) -> None:
        """Sees to it that held requests have something to wait for, or are told that not."""
        if service.dispatcher.held:
            refusal = self._want(service)
            if refusal is not None:
                service.dispatcher.refuse_held(refusal)

    async def _start(self, service: Service, replica: Replica) -> None:
        waterfall = Waterfall(self._clock.monotonic_s, replica.name)
        started_s = self._clock.wall_s()
        try:
            with waterfall.stage("acquire"):
                dispatcher = service.dispatcher
                may_evict = dispatcher.held > 0 and not dispatcher.endpoints
                replica.lease = await self._supply.claim(replica.app, may_evict=may_evict)
                self._telemetry.slot_reserved(replica, Use.STARTING)
                await self._supply.durable()
                await self._state.add_replica(
                    replica.name, replica.app, replica.lease, state=replica.state, purpose="serve"
                )
            spec = replica.app.spec(self.mounts(replica.app))
            report = await self._node.start(StartOrder(replica.name, replica.lease, spec))
        except NoSupplyError as error:
            replica.on(ReplicaEvent.FAILED)
            self._no_supply(service, error)
            return
        except NagaraError as error:
            is_apps = not isinstance(error, NodeUnavailableError)
            await self._start_failed(service, replica, waterfall, started_s, error, is_apps)
            return
        except asyncio.CancelledError:
            if replica.lease is not None:
                await asyncio.shield(self._end_cancelled(replica))
            raise
        total_s = waterfall.elapsed_s()
        waterfall.add(report.stages)
        record = succeeded(replica, report, waterfall, total_s, started_s)
        self._route(service, replica, total_s, started(record))
        await self._record_start(service, replica, report, record)

    def _route(self, service: Service, replica: Replica, start_s: float, start: Started) -> None:
        replica.on(ReplicaEvent.READY)
        replica.ready_s = self._clock.monotonic_s()
        if replica.lease is not None:
            self._lending.ready(replica.lease)
        if service.is_current(replica):
            service.recent_starts.add(StartKind(start.kind), start_s)
        self._add_endpoint(service, replica, start_s, start)
        self.roll(service)

    def _add_endpoint(
        self, service: Service, replica: Replica, start_s: float, start: Started | None
    ) -> None:
        assert replica.ready_s is not None
        endpoint = Endpoint(
            replica.name, Upstream(partial(self._node.dial, replica.name)),
            service.app.scale.concurrency, replica.ready_s, start_s,
            turned=partial(self._telemetry.slot_turned, service, replica), started=start,
        )  # fmt: skip
        service.dispatcher.add(endpoint)
        if not endpoint.running:
            self._telemetry.slot_turned(service, replica, is_busy=False)

    async def _record_start(
        self, service: Service, replica: Replica, report: StartReport, record: StartRecord
    ) -> None:
        self.captures.started(service, replica.app, report, replica.lease)
        self._telemetry.start_ends(record)
        await self._state.add_start(record)
        if replica.state is _S.READY:
            await self._state.set_replica(replica.name, _S.READY)
        if report.fallback:
            _log.warning("%s: started plainly: %s", replica.name, report.fallback)
        _log.info("%s: %s start took %.2f s", replica.name, report.kind, record.total_s)

    async def _start_failed(
        self,
        service: Service,
        replica: Replica,
        waterfall: Waterfall,
        started_s: float,
        error: NagaraError,
        is_apps: bool,
    ) -> None:
        """`is_apps`: the app is at fault, or may be; else the machine's agent was away."""
        if replica.state is _S.STARTING:
            replica.on(ReplicaEvent.FAILED)
        total_s = waterfall.elapsed_s()
        reason = error.what[-_REASON_CHARS:]
        _log.warning("%s: start failed: %s", replica.name, reason)
        now_s = self._clock.monotonic_s()
        if is_apps:
            service.failures.note(reason, now_s)
            if replica.lease is not None:
                self._lending.failed(replica.lease, replica.app, reason)
            self.nudge(service)
        else:
            service.short_until_s = now_s + SHORT_PAUSE_S  # the next tick tries again
        # Its end must be certain before another gets the slot, also if the node was unreachable.
        await self._stop_surely(replica.name)
        await self._state.set_replica(replica.name, _S.FAILED, reason)
        record = failed(replica, reason, waterfall, total_s, started_s)
        self._telemetry.start_ends(record)
        await self._state.add_start(record)

    def _no_supply(self, service: Service, error: NoSupplyError) -> None:
        now_s = self._clock.monotonic_s()
        service.short_until_s = now_s + SHORT_PAUSE_S
        for name in give_way(service.outdated(now_s)):
            self.drain(service, name)
            self.start(service)
            return
        if not service.is_coming:
            said, after_s = f"{error.what}: {error.hint}", error.retry_after_s
            refusal = Refusal(503, said, code="no_supply", retry_after_s=after_s)
            service.dispatcher.refuse_held(refusal)

    async def _end_cancelled(self, replica: Replica) -> None:
        await self._stop_surely(replica.name)
        await self._state.set_replica(replica.name, _S.STOPPED, "start cancelled")

    def _start_ended(self, service: Service, replica: Replica, task: asyncio.Task[None]) -> None:
        """Also runs when the task was cancelled before it began."""
        self._starts.pop(replica.name, None)
        if replica.state in (_S.STOPPING, _S.FAILED) and replica.ready_s is None:
            self._gone(service, replica)

    # -- ending ----------------------------------------------------------------------------

    async def _retire(
        self,
        service: Service,
        replica: Replica,
        endpoint: Endpoint | None,
        reason: str | None = None,
    ) -> None:
        """Ends a replica whose route is gone, after its last request or its own end."""
        if endpoint is not None:
            if replica.state is _S.DRAINING:
                await self._state.set_replica(replica.name, _S.DRAINING)
                await self._draining.wait(endpoint, service.app.timeouts.request_s)
            await endpoint.upstream.close()
        if replica.state is _S.DRAINING:
            replica.on(ReplicaEvent.DRAINED)
        await self._stop_surely(replica.name)
        if replica.state is _S.STOPPING:
            replica.on(ReplicaEvent.STOPPED)
        await self._state.set_replica(replica.name, replica.state, reason)
        self._gone(service, replica)

    async def _stop_surely(self, name: str) -> None:
        """Returns when the node has confirmed that the replica has ended."""
        await surely(partial(self._node.stop, name), f"{name}: cannot be stopped yet", self._clock)

    def _gone(self, service: Service, replica: Replica) -> None:
        service.replicas.pop(replica.name, None)
        self._all.pop(replica.name, None)
        self._telemetry.slot_free(replica.name)
        if replica.lease is not None:
            self._supply.release(replica.lease)
            replica.lease = None
        service.gone.set()

    # -- room ------------------------------------------------------------------------------

    def _freeing(self) -> int:
        """Slots whose replicas are being ended."""
        coming = (_S.STARTING, _S.READY)
        replicas = [replica for _, replica in self._all.values() if replica.lease is not None]
        ending = sum(replica.state not in coming for replica in replicas)
        return ending + self.captures.freeing

    def _make_room(self, may_evict: bool) -> bool:
        """Gives up a capture, or an idle replica that its app need not keep."""
        if self.captures.give_way():
            return True
        if not may_evict:
            return False
        idle = longest_idle(self.services.values(), self._clock.monotonic_s())
        if idle is None:
            return False
        service, name = idle
        _log.info("%s: gives its slot to an app with waiting requests", name)
        self.drain(service, name)
        return True

    # -- what the node says ----------------------------------------------------------------

    def ready_replicas(self) -> list[str]:
        """The replicas that the node must have running."""
        return [name for name, (_, replica) in self._all.items() if replica.state is _S.READY]

    def knows(self, name: str) -> bool:
        """Whether a replica of that name is any of ours, whatever its state."""
        return name in self._all or name in self.captures.running or name in self._stopping

    def adopt(self, status: ReplicaStatus) -> bool:
        """Routes a replica that an earlier control process left, if it fits."""
        service = self.services.get(status.app)
        app = None if service is None else service.version_of(status)
        if service is None or app is None or not self._supply.adopt(status.lease, app):
            return False
        now_s = self._clock.monotonic_s()
        replica = Replica(status.replica, app, status.lease)
        replica.on(ReplicaEvent.READY)
        replica.ready_s = now_s
        self._register(service, replica)
        self._telemetry.slot_reserved(replica, Use.KEEP_ALIVE)
        self._add_endpoint(service, replica, 0.0, None)
        service.memory = after_restart(now_s)
        if app.definition != service.app.definition:
            service.roll_target += 1  # the change of versions that was under way goes on
        return True

    def lost(self, lost: Lost) -> None:
        """A lease is over because its machine is gone: so is whatever ran under it."""
        for name, (service, replica) in list(self._all.items()):
            if same_grant(replica.lease, lost.lease):
                self.cancel(service, name)
                self.ended(name, None)
                self.nudge(service)

    def stop_unknown(self, name: str) -> None:
        """Ends a replica that nobody ordered, or that nobody remembers."""
        self._stopping.add(name)

        async def stop() -> None:
            try:
                await self._stop_surely(name)
            finally:
                self._stopping.discard(name)

        self._tasks.spawn(stop, f"stop unknown {name}")

    def ended(self, name: str, exit_code: int | None, reason: str | None = None) -> None:
        """A replica has ended: whatever runs on it fails, and it is replaced.

        Args:
            reason: why its machine has ended it; None: by itself.
        """
        if name not in self._all:
            return
        service, replica = self._all[name]
        if replica.state in (_S.STARTING, _S.STOPPED, _S.FAILED):
            return
        was_ready = replica.state is _S.READY
        replica.on(ReplicaEvent.EXITED)
        if was_ready:
            how = "disappeared" if exit_code is None else f"ended by itself (exit code {exit_code})"
            how = how if reason is None else f"was ended: {reason}"
            _log.warning("%s: %s", name, how)
            self._note_early_end(service, name, f"{name} {how}")
            endpoint = service.dispatcher.remove(name)
            retire = partial(self._retire, service, replica, endpoint, reason)
            self._tasks.spawn(retire, f"bury {name}")
            self.nudge(service)
        else:
            self._draining.cut(name)

    def _note_early_end(self, service: Service, name: str, reason: str) -> None:
        """An end before the app has proven that it can run is a failed start."""
        now_s = self._clock.monotonic_s()
        if not service.dispatcher.endpoints[name].has_proven(now_s):
            service.failures.note(reason, now_s)
