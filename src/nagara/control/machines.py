"""All machines as one `Node`: each replica's calls go to the machine of its lease.

The own machine is always there and is asked as before. Others are reached through the pool's
leases: a start carries its lease's end on that machine's clock, and a replica of a machine that
does not answer is gone when its lease is over, not before. Called on the loop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from nagara.base.clock import Clock, SystemClock
from nagara.contract.machine import MachineUnreachableError
from nagara.contract.node import Node, NodeError, NodeUnavailableError, ReplicaGoneError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    ImageOrder,
    ImageReport,
    Lease,
    NodeFacts,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartOrder,
    StartReport,
)
from nagara.control.zone import OWN, Zone
from nagara.pool.machines import Machine
from nagara.pool.service import PoolService

RELISTEN_S = 2.0
ANSWER_S = 5.0  # of an agent on another machine, for what it answers from memory
STOP_S = 20.0  # beside the grace: a replica is cleared away

_log = logging.getLogger(__name__)

Nodes = Callable[[str], Node]  # by a machine's address
Secrets = Callable[[str, Sequence[str]], tuple[tuple[str, str], ...]]


def no_secrets(tenant: str, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """For apps that have none."""
    assert not names
    return ()


class Machines:
    """The nodes of one pool.

    Args:
        own: the node of this machine.
        nodes: reaches the node of another; must not block.
        secrets: gives the values of a spec's `secret_names` for a tenant.
    """

    def __init__(
        self,
        own: Node,
        pool: PoolService,
        nodes: Nodes,
        secrets: Secrets = no_secrets,
        clock: Clock | None = None,
    ) -> None:
        self._own = own
        self._pool = pool
        self._nodes = nodes
        self._secrets = secrets
        self._away: dict[str, tuple[Machine, Lease]] = {}  # replicas of other machines
        self._last_seen: dict[str, tuple[ReplicaStatus, ...]] = {}  # by machine
        self.zone = Zone(self._all, clock or SystemClock())

    def _all(self) -> dict[str, Node]:
        return {OWN: self._own} | {one.name: self._node(one) for one in self._others()}

    async def facts(self) -> NodeFacts:
        return await self._own.facts()

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        return await self._own.use_caches(caches)

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        """To this machine; another one brings it by itself when it first starts from it."""
        return await self._own.bring_image(order)

    async def start(self, order: StartOrder) -> StartReport:
        order = replace(order, spec=self._with_secrets(order.spec))
        machine = self._pool.machine_of(order.lease)
        if machine is None or machine.is_own:
            return await self._own.start(order)
        lease = await self._sent(order.replica, machine, order.lease)
        report = await self._node(machine).start(replace(order, lease=lease))
        self._saw(machine, order)
        return report

    def _saw(self, machine: Machine, order: StartOrder) -> None:
        """A machine that is cut off before it is asked what it runs has this replica all the
        same."""
        spec, lease = order.spec, order.lease
        status = ReplicaStatus(
            order.replica, spec.tenant, spec.app, spec.definition, lease, ready=True
        )
        self._last_seen[machine.name] = (*self._last_seen.get(machine.name, ()), status)

    async def _sent(self, replica: str, machine: Machine, lease: Lease) -> Lease:
        """The lease with its end there; from now on the replica is that machine's."""
        end_s = await self._end_of(lease)
        self._away[replica] = (machine, lease)
        if not self.zone.knows(machine.name):
            await self.zone.tell(machine.name, self._node(machine))
        return replace(lease, expires_at_s=end_s)

    def machines_of(self, scope: str) -> list[str]:
        """Those that a snapshot of that scope is for."""
        return [name for name in self._all() if self.zone.host_class(name) == scope]

    async def _end_of(self, lease: Lease) -> float:
        try:
            end_s = await self._pool.terms(lease)
        except MachineUnreachableError as error:
            raise NodeUnavailableError(error.what, where=error.where) from error
        if end_s is None:
            raise NodeError("its lease is over already", where=lease.slot)
        return end_s

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        if order.spec.rules.with_secrets:
            order = replace(order, spec=self._with_secrets(order.spec))
        machine = self._pool.machine_of(order.lease)
        if machine is None or machine.is_own:
            return await self._own.capture(order)
        lease = await self._sent(order.replica, machine, order.lease)
        return await self._node(machine).capture(replace(order, lease=lease))

    def capture_scope(self, lease: Lease, image: str) -> tuple[str, str]:
        """A machine, and what names all that can use a snapshot made there.

        Those of one host class, if they find each other's; a machine's own tree is its alone.
        """
        machine = self._pool.machine_of(lease)
        name = OWN if machine is None or machine.is_own else machine.name
        host_class = self.zone.host_class(name)
        is_shared = bool(self.zone.caches and host_class) and image != "host"
        return name, host_class if is_shared else f"{host_class}@{name}"

    def _with_secrets(self, spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, secrets=self._secrets(spec.tenant, spec.secret_names))

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        away = self._away.get(replica)
        if away is None:
            await self._own.stop(replica, grace_s=grace_s)
            return
        machine, lease = away
        if self._pool.is_present(lease):
            try:
                async with _within(STOP_S + grace_s, machine):
                    await self._node(machine).stop(replica, grace_s=grace_s)
            except NodeUnavailableError:
                self._pool.abandon(lease)
                raise  # it is asked again until it answers, or the lease is over
        else:  # its keeper has ended it; what is left of it may as well go
            with contextlib.suppress(NodeError):
                async with _within(ANSWER_S, machine):
                    await self._node(machine).stop(replica, grace_s=0.0)
        self._away.pop(replica, None)

    async def dial(self, replica: str) -> socket.socket:
        away = self._away.get(replica)
        if away is None:
            return await self._own.dial(replica)
        async with _within(ANSWER_S, away[0]):
            return await self._node(away[0]).dial(replica)

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Those of machines that do not answer are told as last seen while their leases run."""
        found = list(await self._own.replicas())
        others = self._others()
        for machine, statuses in zip(
            others, await asyncio.gather(*map(self._replicas_of, others)), strict=True
        ):
            found += statuses
            for status in statuses:
                self._away.setdefault(status.replica, (machine, status.lease))
        self._last_seen = {m.name: self._last_seen.get(m.name, ()) for m in others}
        return tuple(found)

    async def _replicas_of(self, machine: Machine) -> tuple[ReplicaStatus, ...]:
        before = self._last_seen.get(machine.name, ())
        try:
            async with _within(ANSWER_S, machine):
                statuses = await self._node(machine).replicas()
        except NodeError as error:
            _log.warning("%s does not say what it runs: %s", machine.name, error.what)
            known = self._last_seen.get(machine.name, ())
            return tuple(one for one in known if self._pool.is_present(one.lease))
        told = {one.replica for one in (*before, *statuses)}
        since = (one for one in self._last_seen.get(machine.name, ()) if one.replica not in told)
        self._last_seen[machine.name] = (*statuses, *since)
        return statuses

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        """A machine that does not answer in time is left out."""
        asked = [self._own.usage(), *(self._usage_of(machine) for machine in self._others())]
        return tuple(usage for found in await asyncio.gather(*asked) for usage in found)

    async def disk(self) -> DiskReport:
        """Of this machine: another one keeps to its own budget."""
        return await self._own.disk()

    async def _usage_of(self, machine: Machine) -> tuple[ReplicaUsage, ...]:
        try:
            async with _within(ANSWER_S, machine):
                return await self._node(machine).usage()
        except NodeError:  # `replicas` says it
            return ()

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        queue: asyncio.Queue[ReplicaStatus | NodeError] = asyncio.Queue()
        listening = {"": asyncio.create_task(_listen(self._own, queue, is_own=True))}
        try:
            while True:
                others = {machine.name: machine for machine in self._others()}
                for name in others.keys() - listening.keys():
                    node = self._node(others[name])
                    listening[name] = asyncio.create_task(_listen(node, queue, is_own=False))
                for name in listening.keys() - others.keys() - {""}:
                    listening.pop(name).cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELISTEN_S):
                        heard = await queue.get()
                        if isinstance(heard, NodeError):
                            raise heard
                        yield heard
                for name in [name for name, task in listening.items() if task.done() and name]:
                    del listening[name]
        finally:
            for task in listening.values():
                task.cancel()
            await asyncio.gather(*listening.values(), return_exceptions=True)

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        if (away := self._away.get(replica)) is not None:
            async with _within(ANSWER_S, away[0]):
                return await self._node(away[0]).logs(replica, tail_bytes=tail_bytes)
        try:
            return await self._own.logs(replica, tail_bytes=tail_bytes)
        except ReplicaGoneError:
            for machine in self._others():
                with contextlib.suppress(ReplicaGoneError, NodeUnavailableError):
                    async with _within(ANSWER_S, machine):
                        return await self._node(machine).logs(replica, tail_bytes=tail_bytes)
            raise

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """Those of machines that do not answer are left out."""
        others = self._others()
        found = await asyncio.gather(self._own.snapshots(), *map(self._snapshots_of, others))
        return tuple(one for each in found for one in each)

    async def _snapshots_of(self, machine: Machine) -> tuple[SnapshotStatus, ...]:
        try:
            async with _within(ANSWER_S, machine):
                found = await self._node(machine).snapshots()
        except NodeError as error:
            _log.warning("%s does not say what it has saved: %s", machine.name, error.what)
            return ()
        return tuple(replace(one, machine=machine.name) for one in found)

    async def forget_app(self, tenant: str, app: str) -> None:
        await self._own.forget_app(tenant, app)
        for machine in self._others():
            try:
                async with _within(ANSWER_S, machine):
                    await self._node(machine).forget_app(tenant, app)
            except NodeUnavailableError as error:
                _log.warning("%s keeps what it has of %s: %s", machine.name, app, error.what)

    def _node(self, machine: Machine) -> Node:
        return self._nodes(machine.address)

    def _others(self) -> list[Machine]:
        """Machines beside the own one whose agents have answered before."""
        return [
            machine
            for machine in self._pool.core.table
            if machine.clock is not None and not machine.is_own
        ]


@contextlib.asynccontextmanager
async def _within(limit_s: float, machine: Machine) -> AsyncIterator[None]:
    """A machine that is cut off may take a call and never answer it."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        what = f"its agent has not answered for {limit_s:g} s"
        raise NodeUnavailableError(what, where=machine.name) from error


async def _listen(
    node: Node, queue: asyncio.Queue[ReplicaStatus | NodeError], *, is_own: bool
) -> None:
    try:
        async for status in node.exits():
            queue.put_nowait(status)
    except NodeError as error:
        if is_own:
            queue.put_nowait(error)
        else:  # it is listened to again; what was missed is found by comparing
            await asyncio.sleep(RELISTEN_S)
