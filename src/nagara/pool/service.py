"""The pool at work: carries out what the core decides, on its own loops.

    tick       1 s     deadlines, writes and actions
    lists      30 s    what every provider really has; every 5 s while machines are on their way
    plan       60 s    sizes the pool: launches and releases; soon after a claim found nothing
    renewals   3 s     leases of machines that have some
    vitals     30 s    machines that are ready; heavy diagnostics where due

`claim` is called from the control process's loop and answers from memory; nothing may be started
under a lease before `durable` has returned. Everything here runs on one loop.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from nagara.base.clock import Clock
from nagara.contract.machine import (
    NO_RESOURCES,
    CheckKind,
    MachineUnreachableError,
    Offering,
    Provider,
    ProviderError,
    Resources,
)
from nagara.contract.replica import Lease
from nagara.pool import asking
from nagara.pool.actions import Granted, Lost, NoSlot
from nagara.pool.carrying import Carrier
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.figures import Figures, figures_of, machine_document
from nagara.pool.health.blame import Blame
from nagara.pool.health.care import Care
from nagara.pool.lease import RENEW_EVERY_S, TTL_S, machine_of
from nagara.pool.ledger import Record
from nagara.pool.machines import Machine, Saved
from nagara.pool.meters import Meters
from nagara.pool.poolfile import plan_document
from nagara.pool.problem import Plan, Problem
from nagara.pool.rounds import VITALS_EVERY_S, Rounds
from nagara.pool.runner import Steadiness
from nagara.pool.setup import PoolSetup
from nagara.pool.sizing import PLAN_EVERY_S, make_problem
from nagara.pool.states import MOVING, MachineEvent
from nagara.pool.statistics import Statistics
from nagara.pool.tasks import Work, for_all, guarded

TICK_S, LIST_EVERY_S, LIST_SOON_S, PLAN_SOON_S = 1.0, 30.0, 5.0, 5.0
ASLEEP_S = 20.0  # later than this, a tick was held up by the host: suspended, or stopped

_log = logging.getLogger(__name__)


class PoolService:
    """One pool.

    Args:
        saved: what an earlier process left in the record.
        new_name: gives names no machine ever had; its argument is what they begin with.

    Attributes:
        on_lost: is told of leases whose machine is gone.
        on_room: is called when slots may have become free.
    """

    def __init__(
        self,
        saved: Saved,
        record: Record,
        setup: PoolSetup,
        clock: Clock,
        new_name: Callable[[str], str],
    ) -> None:
        now_s = clock.monotonic_s()
        self.core = PoolCore(saved, lambda: new_name(saved.pool), now_s, own=setup.own)
        self.care = Care(setup.xids)
        self.meters = Meters(clock.wall_s() - now_s)
        self._blame = Blame()
        self.on_lost: Callable[[Lost], None] = lambda _: None
        self.on_room: Callable[[], None] = lambda: None
        self._record = record
        self._setup = setup
        self._clock = clock
        self._carrier = Carrier(self.core, setup, self.care, clock)
        self._rounds = Rounds(self.core, setup, self.care, clock)
        self._statistics = Statistics(self.core, self.meters, self.care, clock)
        self._steady = Steadiness()
        self._offerings: dict[str, Offering] = {}
        self._problem = Problem((), ())
        self._plan = Plan(source="none")
        self._ticked_s = now_s
        self._is_plan_wanted = False
        self._listed_s = self._planned_s = -math.inf
        self._write_lock = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    def add_provider(self, provider: Provider) -> None:
        """One more to ask, from the next list on."""
        self._carrier.providers = {**self._carrier.providers, provider.name: provider}

    # -- claims ----------------------------------------------------------------------------

    def claim(
        self,
        claimant: Claimant,
        wanted: DemandClass,
        needs: Resources = NO_RESOURCES,
        *,
        is_demand: bool = True,
        machine: str | None = None,
    ) -> Granted | NoSlot:
        """A slot from memory, or why there is none and when the next is expected.

        `is_demand` False: it will do without, so it is not counted and nobody waits behind it;
        then it may ask for one `machine`.
        """
        now_s = self._clock.monotonic_s()
        if not is_demand:
            return self.core.claim_spare(claimant, wanted, needs, machine)
        self.meters.claimed(wanted, now_s)
        answer = self.core.claim(claimant, wanted, now_s, needs)
        if isinstance(answer, NoSlot):
            self._is_plan_wanted = True
        return answer

    def expect(self, wanted: DemandClass) -> None:
        """Claims of this class will come: the least reserve is kept for it from now on."""
        if self.meters.expect(wanted, self._clock.monotonic_s()):
            self._is_plan_wanted = True

    async def durable(self) -> None:
        """Returns when everything granted before is written down."""
        await self._carry_out()

    async def terms(self, lease: Lease) -> float | None:
        """When the lease ends on its machine's clock, for a start that is about to be sent.

        Asks the machine for a reading of its clock first: a lease counts from there. None: the
        lease is no longer the present one. Raises `MachineUnreachableError`.
        """
        machine = self.machine_of(lease)
        if machine is None:
            return None
        try:
            agent = self._setup.agents(machine.name, machine.address)
            answer = await asking.of_machine(machine.name, agent.renew(()), asking.MARK_LIMIT_S)
        except MachineUnreachableError:
            self.core.silent(machine.name)
            raise
        now_s = self._clock.monotonic_s()
        self.core.marked(machine.name, answer.mark_s, now_s, answer.version)
        if machine.clock is None or self.core.grants.held(lease) is None:
            return None
        mark_s = machine.clock.to_send(now_s)
        return None if mark_s is None else mark_s + TTL_S

    def machine_of(self, lease: Lease) -> Machine | None:
        """The machine that a lease is of; None when it is gone."""
        return self.core.table.get(machine_of(lease.slot))

    def is_present(self, lease: Lease) -> bool:
        """Whether something may still run under the lease."""
        return self.core.grants.held(lease) is not None

    def adopt(self, lease: Lease, app: str) -> bool:
        """A replica of an earlier process lives on under this lease; False if it may not."""
        return self.core.adopt(lease, app)

    def settle(self) -> None:
        """Every machine that answers has been asked what it runs: leases nobody holds are over."""
        self.core.tick(self._clock.monotonic_s())

    def give_back(self, lease: Lease) -> None:
        """Ends a lease of a replica that is gone for certain; its slot is free at once.

        Elsewhere than on the own machine it is fenced as well: an order to start it could still
        be on its way.
        """
        machine = self.machine_of(lease)
        if machine is None or machine.is_own:
            self._ended(lease, is_confirmed=True)
        else:
            self._spawn(partial(self.fence, lease), f"fence {lease.slot}")

    def abandon(self, lease: Lease) -> None:
        """Ends a lease whose machine does not answer: its slot is free when its time is over."""
        self._ended(lease, is_confirmed=False)

    async def fence(self, lease: Lease) -> None:
        """Ends a lease: its machine confirms, or the lease's time passes first."""
        held = self.core.grants.held(lease)
        machine = self.machine_of(lease)
        if held is None or machine is None:
            return
        try:
            agent = self._setup.agents(machine.name, machine.address)
            order = agent.fence(lease.slot, lease.epoch + 1)
            await asking.of_machine(machine.name, order, asking.FENCE_LIMIT_S)
        except MachineUnreachableError as error:
            _log.warning("%s does not confirm the end of %s: %s", machine.name, lease.slot, error)
            self._ended(lease, is_confirmed=False)
        else:
            self._ended(lease, is_confirmed=True)
        await self._carry_out()

    def _ended(self, lease: Lease, *, is_confirmed: bool) -> None:
        held = self.core.grants.held(lease)
        now_s = self._clock.monotonic_s()
        if held is not None and self.core.give_back(lease, now_s, is_confirmed=is_confirmed):
            self.meters.returned(held.wanted, now_s)
            self.on_room()

    # -- what is asked and ordered -----------------------------------------------------------

    def figures(self) -> Figures:
        """The pool in numbers."""
        return figures_of(self.core, self._problem)

    def document(self) -> dict[str, Any]:
        """The pool, its machines and its figures as JSON."""
        return {
            "pool": self.core.prefix,
            **asdict(self.figures()),
            "alerts": list(self.care.alerts),
            "stuck": self.care.watchdog.stuck(self._clock.monotonic_s()),
            "machines": [
                machine_document(one, self.care.last_report(one.name)) for one in self.core.table
            ],
        }

    def heard_ago(self) -> dict[str, float | None]:
        """Seconds since each machine last answered; None: never, to this process."""
        now_s = self._clock.monotonic_s()
        return {
            one.name: None if one.heard_s == -math.inf else round(now_s - one.heard_s, 1)
            for one in self.core.table
        }

    def plan_document(self) -> dict[str, Any]:
        """The latest plan as JSON, with its explanation."""
        return plan_document(self._problem, self._plan)

    async def drain(self, name: str) -> None:
        """A person's order: no new leases there, until it is resumed."""
        self.core.hold(name, "drained by hand", self._clock.monotonic_s())
        await self._carry_out()

    async def resume(self, name: str) -> None:
        """A person's order: back into use."""
        self.core.resume(name, self._clock.monotonic_s())
        await self._carry_out()

    async def diagnose(self, name: str, kind: CheckKind) -> None:
        """A person's order: once it is empty, it is looked at."""
        self.core.diagnose(name, kind, "to be diagnosed by hand", self._clock.monotonic_s())
        await self._carry_out()

    def replica_failed(self, lease: Lease, app: str, reason: str) -> None:
        """A replica could not start, or ended: if that lies with its machine, it is looked at."""
        now_s = self._clock.monotonic_s()
        name = machine_of(lease.slot)
        why = self._blame.failed(name, app, reason, now_s)
        if why is not None:
            _log.warning("%s is to be looked at: %s", name, why)
            self.care.suspect(self.core, name, why, now_s)

    def replica_ready(self, lease: Lease) -> None:
        """A replica has become ready under the lease."""
        self._blame.served(machine_of(lease.slot))

    # -- life ------------------------------------------------------------------------------

    async def load(self) -> None:
        """Takes over what earlier processes have measured."""
        saved = await self._record.fact("statistics")
        if saved is not None:
            self._statistics.load(saved)

    async def run(self) -> None:
        """Until cancelled. Machines and leases live on."""
        loops: list[tuple[str, float, float, Work]] = [  # how often it runs, and does something
            ("ticks", TICK_S, TICK_S, self.tick),
            ("renewals", RENEW_EVERY_S, RENEW_EVERY_S, self._renew_all),
            ("vitals", VITALS_EVERY_S, VITALS_EVERY_S, self._look_at_all),
            ("statistics", PLAN_EVERY_S, PLAN_EVERY_S, self._keep_statistics),
        ]
        if self._carrier.providers:
            # Apart: a provider that hangs must not hold up plans for the others.
            loops.append(("lists", TICK_S, LIST_EVERY_S, self._list_if_due))
            loops.append(("plans", TICK_S, PLAN_EVERY_S, self._plan_if_due))
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await guarded(self._list_all)
                self._is_plan_wanted = True
                for loop in loops:
                    group.create_task(self._repeat(*loop), name=f"pool {loop[0]}")
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    async def close(self) -> None:
        """Writes what is not written yet. Called after `run` has ended."""
        await self._carry_out()
        await self._keep_statistics()

    async def _repeat(self, name: str, every_s: float, expected_s: float, work: Work) -> None:
        count = 0
        self.care.watchdog.expect(name, expected_s, self._clock.monotonic_s())
        if name in ("vitals", "statistics"):
            await self._clock.sleep(every_s)  # the first minute belongs to the apps
        while True:
            if await guarded(work):
                count += 1
                self.care.watchdog.progress(name, count, self._clock.monotonic_s())
            await self._clock.sleep(every_s)

    def _spawn(self, work: Work, name: str) -> None:
        if self._group is not None:
            self._group.create_task(guarded(work), name=name)

    async def tick(self) -> None:
        """Deadlines, and whatever waits to be written and done."""
        now_s = self._clock.monotonic_s()
        asleep_s = now_s - self._ticked_s - TICK_S
        self._ticked_s = now_s
        if asleep_s > ASLEEP_S:
            _log.warning("nothing ran for %.0f s: deadlines are put off", asleep_s)
            self.core.slept(asleep_s)
            self.care.watchdog.slept(asleep_s)
        self.core.tick(now_s)
        self.care.look_for_stuck(now_s)
        await self._carry_out()
        self.on_room()

    async def _carry_out(self) -> None:
        """Writes, then starts the actions. Writes of two callers do not overtake each other."""
        async with self._write_lock:
            writes = self.core.take_writes()
            actions = self.core.take_actions() if self._group is not None else []
            try:
                if writes:
                    await asyncio.shield(self._record.write(writes))
            except Exception:
                self.core.put_back(writes, actions)
                raise
        for action in actions:
            self._spawn(partial(self._act, action), str(action))
        for lost in self.core.take_lost():
            _log.warning("%s is lost to %s: %s", lost.lease.slot, lost.app, lost.reason)
            self.on_lost(lost)

    async def _act(self, action: Any) -> None:
        await self._carrier.act(action)
        await self._carry_out()
        self.on_room()

    async def _renew_all(self) -> None:
        await self._rounds.renew_all()

    async def _look_at_all(self) -> None:
        await self._rounds.look_at_all(lambda: self.figures().target)
        await self._carry_out()

    async def _keep_statistics(self) -> None:
        document = self._statistics.changed()
        if document is not None:
            await self._record.put_fact("statistics", document)

    # -- providers and plans ---------------------------------------------------------------

    async def _list_if_due(self) -> bool:
        """Soon while the lists say how far something is; False: not yet."""
        is_moving = any(machine.state in MOVING for machine in self.core.table)
        pause_s = LIST_SOON_S if is_moving else LIST_EVERY_S
        if self._clock.monotonic_s() < self._listed_s + pause_s:
            return False
        await self._list_all()
        return True

    async def _plan_if_due(self) -> bool:
        """Soon when something has happened; False: not yet."""
        passed_s = self._clock.monotonic_s() - self._planned_s
        is_due = passed_s >= PLAN_EVERY_S
        if not is_due and not (self._is_plan_wanted and passed_s >= PLAN_SOON_S):
            return False
        await self.plan(is_due=is_due)
        return True

    async def _list_all(self) -> None:
        self._listed_s = self._clock.monotonic_s()
        await for_all(self._list, tuple(self._carrier.providers))
        await self._carry_out()

    async def _list(self, name: str) -> None:
        """What one provider offers, and what it has: one says nothing of the other."""
        provider = self._carrier.providers[name]
        try:
            offerings = await asking.of_provider(name, provider.offerings())
        except ProviderError as error:
            _log.warning("%s offers nothing: %s", name, error)
        else:
            kept = {k: v for k, v in self._offerings.items() if v.provider != name}
            self._offerings = kept | {one.id: one for one in offerings}
        begun_s = self._clock.monotonic_s()
        try:
            machines = await asking.of_provider(name, provider.machines())
        except ProviderError as error:
            _log.warning("%s gives no list: %s", name, error)
            return
        now_s = self._clock.monotonic_s()
        doubt = self.core.listed(name, machines, self._offerings, begun_s, now_s)
        if doubt is not None:
            self.care.alert(doubt)

    async def plan(self, *, is_due: bool = True) -> None:
        """Makes a plan and orders what it says. One out of turn gives nothing back."""
        now_s = self._planned_s = self._clock.monotonic_s()
        self._is_plan_wanted = False
        offerings = list(self._offerings.values())
        self._problem = make_problem(self.core, offerings, self.meters, self._setup.policy, now_s)
        if not self._problem.offers:
            return
        self._plan = plan = await self._setup.planning.plan(self._problem)
        now_s = self._clock.monotonic_s()
        for name, count in plan.launches:
            for _ in range(count if name in self._offerings else 0):
                self.core.request(self._offerings[name], now_s)
        for name, count in self._steady.releases(plan) if is_due else ():
            for machine in self.core.grants.inventory.idle(name)[:count]:
                self.core.drain(machine.name, MachineEvent.RELEASE, "not needed", now_s)
        await self._carry_out()
