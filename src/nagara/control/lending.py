"""Slots of the pool for replicas of apps: who claims, what for, and what comes of it.

Called on the loop. What an app accepts is read from its definition here and nowhere else.
"""

from nagara.contract.machine import Resources
from nagara.contract.replica import Lease
from nagara.control.app import App
from nagara.pool.actions import Granted, NoSlot
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.providers.local import NAME as HERE
from nagara.pool.service import PoolService


def wanted_by(app: App) -> DemandClass:
    """The machines that may run a replica of the app."""
    types = None if app.device == "any" else frozenset({app.device})
    return DemandClass(types, app.regions)


def needs_of(app: App) -> Resources:
    """What a replica takes of its machine beside devices: what it is limited to."""
    return Resources(
        app.limits.cpu or 0.0, app.limits.memory_bytes or 0, app.limits.disk_bytes or 0
    )


class Lending:
    """The pool as the fleet uses it."""

    def __init__(self, pool: PoolService) -> None:
        self.pool = pool

    def expect(self, app: App) -> None:
        """The app is deployed: its replicas will want slots."""
        self.pool.expect(wanted_by(app))

    def claim(self, app: App) -> Lease | NoSlot:
        """A slot for a replica, at once."""
        granted = self.pool.claim(Claimant(app.name, app.priority), wanted_by(app), needs_of(app))
        return granted.lease if isinstance(granted, Granted) else granted

    def claim_here(self, app: App) -> Lease | None:
        """A slot of this machine, where snapshots are made, if one is free."""
        here = DemandClass(wanted_by(app).types, (HERE,))
        granted = self.pool.claim(
            Claimant(app.name, app.priority), here, needs_of(app), is_demand=False
        )
        return granted.lease if isinstance(granted, Granted) else None

    def claim_on(self, app: App, machine: str) -> Lease | None:
        """A slot of another machine, if one is free."""
        granted = self.pool.claim(
            Claimant(app.name, app.priority), wanted_by(app), needs_of(app),
            is_demand=False, machine=machine,
        )  # fmt: skip
        return granted.lease if isinstance(granted, Granted) else None

    async def durable(self) -> None:
        """Returns when everything claimed before is written down: only then may it be used."""
        await self.pool.durable()

    def release(self, lease: Lease) -> None:
        """The replica is gone for certain."""
        self.pool.give_back(lease)

    def failed(self, lease: Lease, app: App, reason: str) -> None:
        """A replica under the lease could not start, or has ended by itself."""
        self.pool.replica_failed(lease, app.name, reason)

    def ready(self, lease: Lease) -> None:
        """A replica under the lease serves."""
        self.pool.replica_ready(lease)

    def adopt(self, lease: Lease, app: App) -> bool:
        """A replica of an earlier process goes on under its lease; False if it may not."""
        return self.pool.adopt(lease, app.name)
