"""Asks all machines again and again: leases are renewed, monitors heard, calendars kept.

Called from the pool's tasks.
"""

import logging
from collections.abc import Callable

from nagara.base.clock import Clock
from nagara.contract.machine import CheckKind, MachineUnreachableError, Renewal
from nagara.pool import asking
from nagara.pool.core import PoolCore
from nagara.pool.health.care import Care
from nagara.pool.lease import TTL_S
from nagara.pool.machines import Machine
from nagara.pool.setup import PoolSetup
from nagara.pool.states import MachineState
from nagara.pool.tasks import for_all

VITALS_EVERY_S = 30.0

_log = logging.getLogger(__name__)


class Rounds:
    """The rounds of one pool."""

    def __init__(self, core: PoolCore, setup: PoolSetup, care: Care, clock: Clock) -> None:
        self._core = core
        self._setup = setup
        self._care = care
        self._clock = clock
        self._is_own_checked = False

    async def renew_all(self) -> None:
        """Leases that are out are prolonged; who was silent is asked whether it still is."""
        await for_all(
            self._renew,
            [
                machine.name
                for machine in self._core.table
                if machine.clock is not None
                and not machine.is_own
                and (machine.held or machine.is_silent)
            ],
        )

    async def _renew(self, name: str) -> None:
        machine = self._core.table.get(name)
        if machine is None or machine.clock is None:
            return
        mark_s = machine.clock.to_send(self._now_s()) if machine.held else None
        renewals: tuple[Renewal, ...] = ()
        if mark_s is not None:
            renewals = tuple(
                Renewal(held.slot, held.epoch, mark_s, TTL_S)
                for held in machine.held.values()
                if held.free_at_s is None  # one that was given back is left to end
            )
        try:
            agent = self._setup.agents(name, machine.address)
            answer = await asking.of_machine(name, agent.renew(renewals), asking.MARK_LIMIT_S)
        except MachineUnreachableError as error:
            if not machine.is_silent:
                _log.warning("leases of %s are not renewed: %s", name, error)
            self._core.silent(name)
            return
        self._core.marked(name, answer.mark_s, self._now_s(), answer.version)

    async def look_at_all(self, target: Callable[[], float]) -> None:
        """Machines that are ready say how they are; those that are due are diagnosed."""
        self._care.look_at_schedule(self._core, target(), self._now_s())
        ready = [one.name for one in self._core.table if one.state is MachineState.READY]
        await for_all(self._look_at, ready)
        self._care.watch(self._core, VITALS_EVERY_S, self._now_s())

    async def _look_at(self, name: str) -> None:
        machine = self._core.table.get(name)
        if machine is None:
            return
        agent = self._setup.agents(name, machine.address)
        try:
            vitals = await asking.of_machine(
                name, agent.vitals(self._care.heard(name)), asking.VITALS_LIMIT_S
            )
            self._core.heard(name, self._now_s())
            self._care.seen(self._core, name, vitals, self._now_s())
            if machine.is_own and not machine.held and not self._is_own_checked:
                self._is_own_checked = True
                await self._check_own(machine)
        except MachineUnreachableError as error:
            _log.info("%s does not say how it is: %s", name, error)

    async def _check_own(self, machine: Machine) -> None:
        """Once, when it is idle: it was in use before it could be looked at."""
        agent = self._setup.agents(machine.name, machine.address)
        report = await asking.of_machine(
            machine.name, agent.check(CheckKind.BOOT), asking.CHECK_LIMIT_S[CheckKind.BOOT]
        )
        why = self._care.judge(machine, report, self._setup.required(machine.offering.type))
        self._care.checked(machine.name, report, why, self._now_s())
        if why is not None:
            self._care.suspect(self._core, machine.name, why, self._now_s())

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
