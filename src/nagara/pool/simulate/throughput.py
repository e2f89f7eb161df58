"""Made-up catalogues and pools of a given size, for measuring the planner and claims."""

import itertools
import random

from nagara.contract.machine import Offering
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.machines import Machine, Saved
from nagara.pool.problem import Demand, Offer, Problem, Rules, Scenario
from nagara.pool.states import MachineState

_TYPES = 24
_PROVIDERS = 10


def catalogue(count: int, *, scenarios: int = 0, seed: int = 1) -> Problem:
    """A problem with `count` offerings of ten providers in their regions, and twelve demands."""
    source = random.Random(seed)  # noqa: S311  # made-up data, no secret
    offers = []
    for number in range(count):
        provider = source.randrange(_PROVIDERS)
        kind = source.randrange(_TYPES)
        devices = source.choice((1, 1, 2, 4, 8))
        inventory = source.choice((0, 0, 0, 0, 1, 4))
        offers.append(
            Offer(
                id=f"o{number}",
                provider=f"p{provider}",
                region=f"p{provider}-r{source.randrange(4 + 2 * provider)}",
                type=f"t{kind}",
                devices=devices,
                price_h=devices * (0.4 + kind / 4) * source.uniform(0.7, 1.5),
                market=source.choice(("spot", "on-demand")),
                inventory=inventory,
                in_flight=source.choice((0.0, 0.0, 0.0, 1.0)),
                idle=source.randint(0, inventory),
                supply=source.choice((0, 1, 1, 1, 2, 8, 32)),
            )
        )
    demands = tuple(
        Demand(
            name=f"d{number}",
            wanted=DemandClass(
                frozenset(f"t{one}" for one in source.sample(range(_TYPES), source.randint(1, 5))),
                devices=source.choice((1, 1, 1, 2, 4)),
            ),
            quantity=source.uniform(20, 40) * count / 200,
            shortage_cost=source.uniform(50, 200),
        )
        for number in range(12)
    )
    futures = tuple(
        Scenario(
            tuple(demand.quantity * source.uniform(0.6, 1.6) for demand in demands),
            tuple(
                offer.supply if source.random() < 0.7 else source.randint(0, offer.supply)
                for offer in offers
            ),
        )
        for _ in range(scenarios)
    )
    ramps = tuple((f"p{number}", 200) for number in range(_PROVIDERS))
    return Problem(tuple(offers), demands, Rules(ramps=ramps), futures)


def big_pool(machines: int, *, offerings: int = 400, devices: int = 8) -> PoolCore:
    """A pool with that many READY machines, nothing leased."""
    numbers = itertools.count()
    core = PoolCore(Saved("n0"), lambda: f"n0-{next(numbers)}", 0.0)
    kinds = [
        Offering(
            f"o{number}", f"p{number % _PROVIDERS}", f"r{number % 40}", f"t{number % _TYPES}",
            devices, 1.0 + number / 1000,
        )
        for number in range(offerings)
    ]  # fmt: skip
    for number in range(machines):
        machine = Machine(
            f"n0-{next(numbers):016x}", kinds[number % offerings], MachineState.READY, 1, 0.0
        )
        core.table.add(machine, is_known=True)
        core.grants.file(machine)
    return core
