"""Apps come, change, go back to an earlier version, and go.

Called by the API's tasks on the loop. What happens to single replicas is the fleet's.
"""

from functools import partial

from nagara.base.clock import Clock
from nagara.contract.node import Node
from nagara.control.app import App
from nagara.control.autoscaler import Memory
from nagara.control.errors import UnknownAppError
from nagara.control.fleet import Fleet
from nagara.control.refusal import Refusal
from nagara.control.replicas import ReplicaState
from nagara.control.service import Service
from nagara.control.state import State, Version
from nagara.control.tasks import surely


class Deployments:
    """The deployed apps."""

    def __init__(self, fleet: Fleet, node: Node, state: State, clock: Clock) -> None:
        self._fleet = fleet
        self._node = node
        self._state = state
        self._clock = clock

    async def begin(self) -> None:
        """Loads the deployed apps. Replicas of an earlier process are then given to the fleet."""
        for deployed in await self._state.apps():
            service = self._fleet.add(deployed.app, deployed.version)
            versions = await self._state.versions(deployed.app.tenant, deployed.app.name)
            service.earlier = {one.app.definition: one.app for one in versions}
            await self._fleet.captures.load(service)

    async def deploy(self, app: App) -> Service:
        """Adds a version of the app and takes it into use."""
        return await self._use(app, await self._state.put_app(app))

    async def rollback(self, service: Service, to: int | None) -> Service:
        """Takes an earlier version into use again; by default the one before the present one.

        Raises:
            UnknownAppError: there is no such version.
        """
        name = service.app.name
        versions = await self.versions(service)
        before = [one for one in versions if one.number < service.version]
        chosen = [one for one in versions if one.number == to] if to is not None else before[:1]
        if not chosen:
            what = f"{name} has no version {to}" if to is not None else f"{name} has none before"
            raise UnknownAppError(what, hint=f"nagara versions {name} lists them")
        version = chosen[0]
        await self._state.set_version(version.app, version.number)
        return await self._use(version.app, version.number)

    async def versions(self, service: Service) -> list[Version]:
        """The app's versions, newest first."""
        return await self._state.versions(service.app.tenant, service.app.name)

    async def fold(self, service: Service) -> None:
        """Drains and ends the app's present replicas; returns when they have gone.

        Only requests from now on start it again: the demand of before is met. A start that held
        requests wait for is not a present replica.
        """
        service.dispatcher.demand.forget(self._clock.monotonic_s())
        service.memory = Memory()
        is_awaited = service.dispatcher.held > 0
        await self._fleet.end_replicas(service, keep_starts=is_awaited)

    async def delete(self, service: Service) -> None:
        """Ends the app and removes what the machine and the state keep of it."""
        app = service.app
        del self._fleet.services[app.name]
        refusal = Refusal(404, f"the app {app.name!r} was deleted", code="not_found")
        service.dispatcher.close(refusal)
        await self._fleet.captures.drop(service)
        await self._fleet.end_replicas(service, keep_starts=False)
        forget = partial(self._node.forget_app, app.tenant, app.name)
        await surely(forget, f"{app.name}: cannot be deleted yet", self._clock)
        await self._state.delete_app(app.tenant, app.name)
        self._fleet.forget(app.name)

    async def _use(self, app: App, version: int) -> Service:
        """Takes a version into use; replicas of another definition are replaced one by one."""
        service = self._fleet.services.get(app.name)
        if service is None:
            service = self._fleet.add(app, version)
            await self._fleet.captures.load(service)
            return service
        is_same = service.app.definition == app.definition
        service.earlier[service.app.definition] = service.app
        service.app, service.version = app, version
        self._fleet.expect(app)
        service.failures.count = 0
        await self._fleet.captures.redeployed(service, is_same=is_same)
        if is_same:
            service.dispatcher.set_capacity(app.scale.concurrency)
        else:
            service.recent_starts.clear()
            for name in list(service.replicas):
                self._fleet.cancel(service, name)
            service.roll_target = min(service.count(ReplicaState.READY), app.scale.max)
            self._fleet.roll(service)
        self._fleet.nudge(service)
        return service
