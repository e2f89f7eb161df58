"""Pools without providers and machines, for tests of what is built on them."""

import itertools
from typing import Any

from nagara.contract.machine import Offering, Presence, ProviderMachine
from nagara.pool.actions import Check, Launch
from nagara.pool.core import PoolCore
from nagara.pool.machines import Saved


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
