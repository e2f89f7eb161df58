"""The pool at work: carries out what the core decides, on its own loops.

    tick       1 s     deadlines, orders of people, writes and actions
    lists      30 s    what every provider really has; at once after a start
    plan       60 s    sizes the pool: launches and releases
    renewals   3 s     leases of machines that have some
    vitals     30 s    machines that are ready; heavy diagnostics where due

`claim` is called from the control process's loop and answers from memory; nothing may be started
under a lease before `durable` has returned. Everything here runs on one loop, except the record,
which blocks and has a thread.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.contract.machine import (
    NO_RESOURCES,
    MachineAgent,
    MachineUnreachableError,
    NoCapacityError,
    Offering,
    Provider,
    ProviderError,
    ProviderRefusedError,
    Renewal,
    Resources,
)
from nagara.contract.replica import Lease
from nagara.pool.actions import Action, Check, Granted, Launch, Lost, NoSlot, Release
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import IllegalEventError, PoolError
from nagara.pool.fairness import Claimant
from nagara.pool.figures import Figures, figures_of
from nagara.pool.health.care import Care
from nagara.pool.health.verdict import failure
from nagara.pool.lease import RENEW_EVERY_S, TTL_S, split_slot
from nagara.pool.ledger import SqliteLedger
from nagara.pool.poolfile import plan_document
from nagara.pool.problem import Problem
from nagara.pool.runner import Runner, Steadiness
from nagara.pool.sizing import PLAN_EVERY_S, Meters, Policy, make_problem
from nagara.pool.states import MachineEvent, MachineState

TICK_S, LIST_EVERY_S, VITALS_EVERY_S = 1.0, 30.0, 30.0
_PROVIDER_LIMIT_S = 150.0

_log = logging.getLogger(__name__)

Agents = Callable[[str, str], MachineAgent]  # by name and address


class PoolService:
    """One pool.

    Args:
        agents: reaches the agent of a machine; must not block.
        required: checks without which a machine is not used, by device type.
        on_lost: is told of leases whose machine is gone.
    """

    def __init__(
        self,
        ledger: SqliteLedger,
        providers: tuple[Provider, ...],
        agents: Agents,
        policy: Policy,
        clock: Clock,
        new_name: Callable[[str], str],
        *,
        required: Callable[[str], frozenset[str]],
        on_lost: Callable[[Lost], None] = lambda _: None,
        runner: Runner | None = None,
    ) -> None:
        saved = ledger.read()
        self.core = PoolCore(saved, lambda: new_name(saved.pool), clock.monotonic_s())
        self.care = Care()
        self._ledger = ledger
        self._providers: Mapping[str, Provider] = {one.name: one for one in providers}
        self._agents = agents
        self._policy = policy
        self._clock = clock
        self._required = required
        self._on_lost = on_lost
        self._runner = runner or Runner()
        self._steady = Steadiness()
        self._meters = Meters()
        self._offerings: dict[str, Offering] = {}
        self._problem = Problem((), ())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nagara-pool")
        self._write_lock = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    def add_provider(self, provider: Provider) -> None:
        """One more to ask, from the next list on."""
        self._providers = {**self._providers, provider.name: provider}

    # -- claims ----------------------------------------------------------------------------

    def claim(
        self, claimant: Claimant, wanted: DemandClass, needs: Resources = NO_RESOURCES
    ) -> Granted | NoSlot:
        """A slot from memory, or why there is none and when the next is expected."""
        now_s = self._clock.monotonic_s()
        self._meters.claimed(wanted, now_s)
        return self.core.claim(claimant, wanted, now_s, needs)

    async def durable(self) -> None:
        """Returns when everything granted before is written down."""
        await self._carry_out()

    async def terms(self, lease: Lease) -> Renewal | None:
        """What a start under this lease carries, so that its machine can refuse one that is late.

        Asks the machine for a reading of its clock first: a lease counts from there. None: the
        lease is no longer the present one. Raises `MachineUnreachableError`.
        """
        machine = self.core.table.get(split_slot(lease.slot)[0])
        if machine is not None:
            answer = await self._agents(machine.name, machine.address).renew(())
            self.core.marked(machine.name, answer.mark_s, self._clock.monotonic_s())
        if machine is None or machine.clock is None or self.core.grants.held(lease) is None:
            return None
        mark_s = machine.clock.to_send(self._clock.monotonic_s())
        return None if mark_s is None else Renewal(lease.slot, lease.epoch, mark_s, TTL_S)

    async def give_back(self, lease: Lease) -> None:
        """Ends a lease: its machine confirms, or the lease's time passes first."""
        held = self.core.grants.held(lease)
        if held is None:
            return
        name, _ = split_slot(lease.slot)
        is_confirmed = await self._fence(name, lease)
        now_s = self._clock.monotonic_s()
        if self.core.give_back(lease, now_s, is_confirmed=is_confirmed):
            self._meters.returned(held.wanted, now_s)
        await self._carry_out()

    async def _fence(self, name: str, lease: Lease) -> bool:
        machine = self.core.table.get(name)
        if machine is None:
            return False
        try:
            await self._agents(name, machine.address).fence(lease.slot, lease.epoch + 1)
        except MachineUnreachableError as error:
            _log.warning("%s does not confirm the end of %s: %s", name, lease.slot, error)
            return False
        return True

    def figures(self) -> Figures:
        """The pool in numbers."""
        return figures_of(self.core, self._problem)

    # -- life ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Machines and leases live on."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._list_all()
                for every_s, work in (
                    (TICK_S, self.tick),
                    (LIST_EVERY_S, self._list_all),
                    (PLAN_EVERY_S, self.plan),
                    (RENEW_EVERY_S, self._renew_all),
                    (VITALS_EVERY_S, self._look_at_all),
                ):
                    group.create_task(self._repeat(every_s, work), name=f"pool {work.__name__}")
        finally:
            self._thread.shutdown(wait=True)

    async def _repeat(self, every_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        name, count = work.__name__, 0
        self.care.watchdog.expect(name, every_s, self._clock.monotonic_s())
        while True:
            await _guarded(work)
            count += 1
            self.care.watchdog.progress(name, count, self._clock.monotonic_s())
            await self._clock.sleep(every_s)

    async def tick(self) -> None:
        """Deadlines, orders, and whatever waits to be written and done."""
        self.core.tick(self._clock.monotonic_s())
        for order in await self._on_thread(self._ledger.orders):
            self._follow(order.machine, order.what)
            await self._on_thread(partial(self._ledger.drop_order, order.id))
        await self._carry_out()

    def _follow(self, machine: str, what: str) -> None:
        now_s = self._clock.monotonic_s()
        try:
            if what == "resume":
                self.core.resume(machine, now_s)
            else:
                self.core.hold(machine, "drained by hand", now_s)
        except (PoolError, IllegalEventError) as error:
            _log.warning("the order to %s %s cannot be followed: %s", what, machine, error)

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _carry_out(self) -> None:
        """Writes, then starts the actions. Writes of two callers do not overtake each other."""
        async with self._write_lock:
            writes, actions = self.core.take_writes(), self.core.take_actions()
            if writes:
                await asyncio.shield(self._on_thread(partial(self._ledger.write, writes)))
        for action in actions:
            assert self._group is not None, "the pool does not run"
            self._group.create_task(_guarded(partial(self._act, action)), name=str(action))
        for lost in self.core.take_lost():
            self._on_lost(lost)

    # -- actions ---------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        if isinstance(action, Launch):
            await self._launch(action)
        elif isinstance(action, Release):
            await self._release(action)
        else:
            await self._check(action)
        await self._carry_out()

    async def _launch(self, launch: Launch) -> None:
        provider = self._providers.get(launch.offering.provider)
        if provider is None:
            self.core.refused(launch, "its provider is not known here", self._clock.monotonic_s())
            return
        try:
            async with asyncio.timeout(_PROVIDER_LIMIT_S):
                await provider.launch(launch.name, launch.offering)
        except (NoCapacityError, ProviderRefusedError) as error:
            _log.info("%s was refused: %s", launch.offering.id, error)
            self.core.refused(launch, error.what, self._clock.monotonic_s())
        except (ProviderError, TimeoutError) as error:
            _log.warning("whether %s was launched is unknown: %s", launch.name, error)
            self.core.unclear(launch, str(error) or "no answer", self._clock.monotonic_s())
        else:
            self.core.accepted(launch, self._clock.monotonic_s())

    async def _release(self, release: Release) -> None:
        provider = self._providers.get(release.provider)
        if provider is None:
            _log.warning("%s cannot be released: no provider %s", release.name, release.provider)
            return
        try:
            async with asyncio.timeout(_PROVIDER_LIMIT_S):
                await provider.release(release.name)
        except (ProviderError, TimeoutError) as error:
            _log.warning("%s is not released yet: %s", release.name, error)
            return  # its deadline asks again
        self.core.released(release, self._clock.monotonic_s())

    async def _check(self, check: Check) -> None:
        machine = self.core.table.get(check.name)
        if machine is None:
            return
        agent = self._agents(machine.name, machine.address)
        try:
            answer = await agent.renew(())
            self.core.marked(machine.name, answer.mark_s, self._clock.monotonic_s())
            report = await agent.check(check.kind)
        except MachineUnreachableError as error:
            _log.info("%s does not answer yet: %s", machine.name, error)
            await self._clock.sleep(RENEW_EVERY_S)
            self.core.check_again(check)
            return
        why = failure(report, self._required(machine.offering.type))
        now_s = self._clock.monotonic_s()
        self.core.checked(check, now_s, why)
        self.care.checked(machine.name, check.kind, why, now_s)
        if (known := self.core.table.get(machine.name)) is not None and known.clock is not None:
            known.clock.received(answer.mark_s, now_s)

    # -- providers and plans ---------------------------------------------------------------

    async def _list_all(self) -> None:
        for provider in self._providers.values():
            begun_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(_PROVIDER_LIMIT_S):
                    offerings = await provider.offerings()
                    machines = await provider.machines()
            except (ProviderError, TimeoutError) as error:
                _log.warning("%s gives no list: %s", provider.name, error)
                continue
            kept = {k: v for k, v in self._offerings.items() if v.provider != provider.name}
            self._offerings = kept | {one.id: one for one in offerings}
            now_s = self._clock.monotonic_s()
            doubt = self.core.listed(provider.name, machines, self._offerings, begun_s, now_s)
            if doubt is not None:
                self.care.alert(doubt)
        await self._carry_out()

    async def plan(self) -> None:
        """Makes a plan and orders what it says."""
        now_s = self._clock.monotonic_s()
        offerings = list(self._offerings.values())
        self._problem = make_problem(self.core, offerings, self._meters, self._policy, now_s)
        if not self._problem.offers:
            return
        plan = await self._runner.plan(self._problem)
        now_s = self._clock.monotonic_s()
        for name, count in plan.launches:
            for _ in range(count if name in self._offerings else 0):
                self.core.request(self._offerings[name], now_s)
        for name, count in self._steady.releases(plan):
            for machine in self.core.grants.inventory.idle(name)[:count]:
                self.core.drain(machine.name, MachineEvent.RELEASE, "not needed", now_s)
        await self._on_thread(
            partial(self._ledger.put_fact, "plan", plan_document(self._problem, plan))
        )
        figures = asdict(self.figures())
        await self._on_thread(partial(self._ledger.put_fact, "figures", figures))
        await self._carry_out()

    # -- machines --------------------------------------------------------------------------

    async def _renew_all(self) -> None:
        """All machines at once: one that hangs must not cost others their leases."""
        async with asyncio.TaskGroup() as group:
            for machine in self.core.table:
                if machine.held and machine.clock is not None:
                    group.create_task(_guarded(partial(self._renew, machine.name)))

    async def _renew(self, name: str) -> None:
        machine = self.core.table.get(name)
        if machine is None or machine.clock is None:
            return
        mark_s = machine.clock.to_send(self._clock.monotonic_s())
        renewals: tuple[Renewal, ...] = ()
        if mark_s is not None:
            renewals = tuple(
                Renewal(held.slot, held.epoch, mark_s, TTL_S)
                for held in machine.held.values()
                if held.free_at_s is None  # one that was given back is left to end
            )
        try:
            async with asyncio.timeout(RENEW_EVERY_S):
                answer = await self._agents(name, machine.address).renew(renewals)
        except (MachineUnreachableError, TimeoutError) as error:
            _log.warning("leases of %s are not renewed: %s", name, error)
            return
        self.core.marked(name, answer.mark_s, self._clock.monotonic_s())

    async def _look_at_all(self) -> None:
        self.care.look_at_schedule(self.core, self.figures().target, self._clock.monotonic_s())
        async with asyncio.TaskGroup() as group:
            for machine in self.core.table:
                if machine.state is MachineState.READY:
                    group.create_task(_guarded(partial(self._look_at, machine.name)))
        for monitor in self.care.watch(self.core, VITALS_EVERY_S, self._clock.monotonic_s()):
            _log.error("%s makes no progress: what it watches is unknown", monitor)
        await self._carry_out()

    async def _look_at(self, name: str) -> None:
        machine = self.core.table.get(name)
        if machine is None:
            return
        try:
            async with asyncio.timeout(VITALS_EVERY_S):
                vitals = await self._agents(name, machine.address).vitals(self.care.heard(name))
        except (MachineUnreachableError, TimeoutError) as error:
            _log.info("%s does not say how it is: %s", name, error)
            return
        self.care.seen(self.core, name, vitals, self._clock.monotonic_s())

    def replica_failed(self, machine: str, reason: str) -> None:
        """A replica ended for a reason that lies with its device: the machine is looked at."""
        self.care.suspect(self.core, machine, reason, self._clock.monotonic_s())


async def _guarded(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A task's root: one failure does not end the pool."""
    try:
        await work()
    except NagaraError as error:
        _log.warning("%s", error)
    except Exception:  # noqa: BLE001  # a task's root
        _log.exception("a task of the pool failed")
