"""Carries out what the core wants done: launches, releases, checks.

Each comes back to the core as an event, whatever becomes of it. Called from the pool's tasks.
"""

import logging

from nagara.base.clock import Clock
from nagara.contract.machine import (
    MachineUnreachableError,
    NoCapacityError,
    Provider,
    ProviderError,
    ProviderRefusedError,
)
from nagara.pool import asking
from nagara.pool.actions import Action, Check, Launch, Release
from nagara.pool.core import PoolCore
from nagara.pool.health.care import Care
from nagara.pool.lease import RENEW_EVERY_S
from nagara.pool.setup import PoolSetup

_log = logging.getLogger(__name__)


class Carrier:
    """The hands of one pool. `providers` are by name and may be added to."""

    def __init__(self, core: PoolCore, setup: PoolSetup, care: Care, clock: Clock) -> None:
        self.providers: dict[str, Provider] = {one.name: one for one in setup.providers}
        self._core = core
        self._setup = setup
        self._care = care
        self._clock = clock

    async def act(self, action: Action) -> None:
        """Does it and tells the core."""
        if isinstance(action, Launch):
            await self._launch(action)
        elif isinstance(action, Release):
            await self._release(action)
        else:
            await self._check(action)

    async def _launch(self, launch: Launch) -> None:
        provider = self.providers.get(launch.offering.provider)
        if provider is None:
            self._core.refused(launch, "its provider is not known here", self._now_s())
            return
        try:
            await asking.of_provider(provider.name, provider.launch(launch.name, launch.offering))
        except (NoCapacityError, ProviderRefusedError) as error:
            _log.info("%s was refused: %s", launch.offering.id, error)
            self._core.refused(launch, error.what, self._now_s())
        except ProviderError as error:
            _log.warning("whether %s was launched is unknown: %s", launch.name, error)
            self._core.unclear(launch, str(error), self._now_s())
        else:
            _log.info("%s was launched as %s", launch.offering.id, launch.name)
            self._core.accepted(launch, self._now_s())

    async def _release(self, release: Release) -> None:
        provider = self.providers.get(release.provider)
        if provider is None:
            _log.warning("%s cannot be released: no provider %s", release.name, release.provider)
            return
        try:
            await asking.of_provider(provider.name, provider.release(release.name))
        except ProviderError as error:
            _log.warning("%s is not released yet: %s", release.name, error)
            return  # its deadline asks again
        self._core.released(release, self._now_s())

    async def _check(self, check: Check) -> None:
        machine = self._core.table.get(check.name)
        if machine is None:
            return
        agent = self._setup.agents(machine.name, machine.address)
        try:
            answer = await asking.of_machine(machine.name, agent.renew(()), asking.MARK_LIMIT_S)
            self._core.marked(machine.name, answer.mark_s, self._now_s(), answer.version)
            limit_s = asking.CHECK_LIMIT_S[check.kind]
            report = await asking.of_machine(machine.name, agent.check(check.kind), limit_s)
        except MachineUnreachableError as error:
            _log.info("%s does not answer yet: %s", machine.name, error)
            await self._clock.sleep(RENEW_EVERY_S)
            self._core.check_again(check)
            return
        why = self._care.judge(machine, report, self._setup.required(machine.offering.type))
        now_s = self._now_s()
        self._core.checked(check, now_s, why)
        self._care.checked(machine.name, report, why, now_s)
        if (known := self._core.table.get(machine.name)) is not None and known.clock is not None:
            known.clock.received(answer.mark_s, now_s)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
