"""The plan when the solver gave none: fill what is missing from the cheapest, release nothing.

Pure. It keeps the same hard limits as the programme: type, region, supply, ramp, utilisation.
"""

import math
from collections import defaultdict

from nagara.pool.problem import Offer, Plan, Problem

_SMALL = 1e-9


def greedy_plan(problem: Problem, note: str) -> Plan:
    """Demands in the order of what their shortage costs; for each, machines by price."""
    rules = problem.rules
    free = [
        rules.utilisation * offer.devices * (offer.inventory + offer.in_flight)
        for offer in problem.offers
    ]
    ramps = dict(rules.ramps)
    launched: defaultdict[int, int] = defaultdict(int)
    together: defaultdict[str, int] = defaultdict(int)
    shortages = []
    for demand in sorted(problem.demands, key=lambda demand: -demand.shortage_cost):
        missing = demand.quantity
        allowed = sorted(
            (n for n, offer in enumerate(problem.offers) if demand.wanted.accepts(offer)),
            key=lambda n: problem.offers[n].price_h / problem.offers[n].devices,
        )
        share = {n: _usable_share(problem.offers[n], demand.wanted.devices) for n in allowed}
        for number in allowed:
            missing -= _take(free, number, share[number], missing)
        for number in allowed:
            offer = problem.offers[number]
            while (
                missing > _SMALL
                and launched[number] < offer.supply
                and together[offer.provider] < ramps.get(offer.provider, math.inf)
            ):
                launched[number] += 1
                together[offer.provider] += 1
                free[number] += rules.utilisation * offer.devices
                missing -= _take(free, number, share[number], missing)
        if missing > _SMALL:
            shortages.append((demand.name, missing))
    return Plan(
        launches=tuple(
            (problem.offers[number].id, count)
            for number, count in sorted(launched.items())
            if count
        ),
        shortages=tuple(shortages),
        source="greedy",
        note=note,
    )


def _usable_share(offer: Offer, devices: int) -> float:
    return devices * (offer.devices // devices) / offer.devices


def _take(free: list[float], number: int, share: float, missing: float) -> float:
    """Gives up to `missing` devices from what is free there; returns how many."""
    given = max(0.0, min(free[number] * share, missing))
    free[number] -= given / share
    return given
