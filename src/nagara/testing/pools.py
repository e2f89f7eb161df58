"""Pools without providers and machines, for tests of what is built on them."""

import asyncio
import itertools
import json
from typing import Any

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    HealthReport,
    Offering,
    Outcome,
    Presence,
    ProviderMachine,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.pool.actions import Check, Launch
from nagara.pool.bootclock import BootClock
from nagara.pool.core import PoolCore
from nagara.pool.ledger import MemoryLedger
from nagara.pool.machines import Saved, Writes
from nagara.pool.setup import PoolSetup


def an_offering(id_: str = "a", **changes: Any) -> Offering:
    """Two devices in one region, one unit of money per hour, except for `changes`."""
    values: dict[str, Any] = {
        "provider": "p", "region": "eu-1", "type": "h100", "devices": 2, "price_h": 1.0,
    }  # fmt: skip
    return Offering(id=id_, **{**values, **changes})


def a_core(
    saved: Saved | None = None, now_s: float = 0.0, *, own: Offering | None = None
) -> PoolCore:
    """A pool whose machines are named n0-0, n0-1, ..."""
    numbers = itertools.count()
    return PoolCore(saved or Saved("n0"), lambda: f"n0-{next(numbers)}", now_s, own=own)


def make_ready(core: PoolCore, offering: Offering, now_s: float = 0.0) -> str:
    """Walks one new machine to READY and returns its name; actions are taken on the way."""
    name = core.request(offering, now_s)
    launch = next(a for a in core.take_actions() if isinstance(a, Launch) and a.name == name)
    core.accepted(launch, now_s)
    seen = [
        ProviderMachine(machine.name, machine.offering.id, Presence.RUNNING)
        for machine in core.table
        if machine.offering.provider == offering.provider
    ]
    core.listed(offering.provider, seen, {offering.id: offering}, now_s, now_s)
    check = next(a for a in core.take_actions() if isinstance(a, Check) and a.name == name)
    core.checked(check, now_s, None)
    return name


class MemoryRecord:
    """A pool's record that outlives the service that writes it, and no more."""

    def __init__(self, pool: str = "n0") -> None:
        self._ledger = MemoryLedger(pool)
        self._facts: dict[str, str] = {}

    async def read(self) -> Saved:
        """Everything."""
        return self._ledger.read()

    async def write(self, writes: Writes) -> None:
        """Keeps it."""
        await asyncio.sleep(0)  # a real one comes back in another turn of the loop
        self._ledger.write(writes)

    async def fact(self, key: str) -> Any:
        """A JSON value kept under a name, or None."""
        text = self._facts.get(key)
        return None if text is None else json.loads(text)

    async def put_fact(self, key: str, value: object) -> None:
        """Keeps a JSON value."""
        self._facts[key] = json.dumps(value)


_rounds = itertools.count(1)


class HealthyAgent:
    """The agent of a machine that nothing is wrong with."""

    async def check(self, kind: CheckKind) -> HealthReport:
        """Everything that is required has passed."""
        names = ("memory", "disk", "clock")
        return HealthReport(kind, tuple(CheckResult(name, Outcome.PASS) for name in names))

    async def vitals(self, heard: str) -> Vitals:
        """A monitor that makes progress, on whatever clock the pool looks."""
        return Vitals(next(_rounds), (), ())

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        """Everything is prolonged."""
        return RenewalAnswer(BootClock().monotonic_s())

    async def fence(self, slot: str, epoch: int) -> None:
        """Nothing runs."""


def a_machine(slots: int) -> PoolSetup:
    """A pool of this machine alone, with so many slots."""
    own = an_offering(
        "local", provider="local", region="local", type="any", devices=slots, price_h=0.0, stock=0
    )
    return PoolSetup(own, lambda name, address: HealthyAgent())
