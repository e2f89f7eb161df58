"""The planned pool against its rivals on one demand, each rival at the best point of its grid.

Chosen after the fact on the same demand, which favours the rivals: the planned pool gets no such
look ahead.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from nagara.pool.planner import Solver
from nagara.pool.simulate.claims import Claim, DemandShape, dispersion, generate
from nagara.pool.simulate.market import World, WorldShape
from nagara.pool.simulate.result import Result
from nagara.pool.simulate.rivals import Reserves, fixed_target, sized_target
from nagara.pool.simulate.shared import SharedPool
from nagara.pool.sizing import Policy

WARM_UP_S = 6 * 3600.0  # filling an empty pool is no policy's merit or fault
FIXED_GRID = (20, 40, *range(50, 131, 5), 140, 160, 200, 250)
PER_APP_GRID = (5, 10, 20, 30, 40, 50, 60, 80, 100)
SIZED_GRID = (0.9, 0.99, 0.999, 0.9999, 0.99999)
_REFILL_S = 260.0  # what a rival's owner would measure in this world
ENOUGH = 0.99

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a rival and what came of it."""

    setting: str
    result: Result


@dataclass(slots=True)
class Comparison:
    """All policies on one demand."""

    claims: int
    dispersion: float
    planned: Result
    fixed: list[Point]
    per_app: list[Point]
    variants: dict[str, Result]

    @property
    def same_cost(self) -> Point:
        """The fixed reserve that serves best without costing more; the cheapest if none."""
        affordable = [one for one in self.fixed if one.result.cost <= self.planned.cost]
        if not affordable:
            return min(self.fixed, key=lambda one: one.result.cost)
        return max(affordable, key=lambda one: one.result.service)

    @property
    def best_per_app(self) -> Point:
        """Reserves per app with the least idle time that serve as well, else the best serving."""
        good = [one for one in self.per_app if one.result.service >= self.planned.service]
        if good:
            return min(good, key=lambda one: one.result.idle_hours)
        return max(self.per_app, key=lambda one: one.result.service)

    def document(self) -> dict[str, object]:
        """For JSON."""
        same, apart = self.same_cost, self.best_per_app
        return {
            "simulated": True,
            "claims": self.claims,
            "dispersion": round(self.dispersion, 2),
            "policies": {
                "planned_shared": self.planned.document(),
                "fixed_same_cost": {"setting": same.setting, **same.result.document()},
                "per_app": {"setting": apart.setting, **apart.result.document()},
            },
            "idle_ratio_to_per_app": round(self.planned.idle_hours / apart.result.idle_hours, 4),
            "grids": {
                "fixed": [{"setting": one.setting, **one.result.document()} for one in self.fixed],
                "per_app": [
                    {"setting": one.setting, **one.result.document()} for one in self.per_app
                ],
            },
            "variants": {name: one.document() for name, one in self.variants.items()},
        }


def compare(
    shape: DemandShape,
    solver: Solver,
    policy: Policy,
    say: Say,
    *,
    variants: bool = True,
    claims: list[Claim] | None = None,
    grids: tuple[Iterable[int], Iterable[int], Iterable[float]] = (
        FIXED_GRID,
        PER_APP_GRID,
        SIZED_GRID,
    ),
) -> Comparison:
    """Runs everything; minutes for a week of demand. `claims`: instead of generated ones."""
    claims = generate(shape) if claims is None else claims
    until_s = shape.days * 86_400
    warm_up_s = min(WARM_UP_S, until_s / 4)

    def planned(name: str, world: WorldShape) -> Result:
        pool = SharedPool(World(world), solver, policy, warm_up_s, name=name)
        return pool.run(claims, until_s, lambda share: say(f"{name}: {100 * share:.0f} %"))

    ours = planned("planned_shared", WorldShape(seed=shape.seed))
    others: dict[str, Result] = {}
    if variants:
        stock = WorldShape(has_stockouts=True, seed=shape.seed)
        both = WorldShape(has_stockouts=True, has_liar=True, seed=shape.seed)
        others["stock_outs"] = planned("stock_outs", stock)
        others["stock_outs_and_lies"] = planned("stock_outs_and_lies", both)
    fixed_grid, per_app_grid, sized_grid = grids
    world = WorldShape(seed=shape.seed)
    fixed = []
    for spares in fixed_grid:
        say(f"fixed reserve of {spares}")
        rival = Reserves("fixed", World(world), 1, fixed_target(spares), warm_up_s)
        fixed.append(Point(f"{spares} spare machines", rival.run(claims, until_s)))
    per_app = []
    for spares in per_app_grid:
        say(f"{spares} spares for each app")
        rival = Reserves("per_app", World(world), shape.apps, fixed_target(spares), warm_up_s)
        per_app.append(Point(f"{spares} spare machines an app", rival.run(claims, until_s)))
    rates = _rates_s(claims, shape)
    for service in sized_grid:
        say(f"reserves sized by each app's rate, {service}")
        target = sized_target(rates, shape.dispersion, service, _REFILL_S)
        rival = Reserves("per_app", World(world), shape.apps, target, warm_up_s)
        per_app.append(Point(f"sized by rate, quantile {service}", rival.run(claims, until_s)))
    return Comparison(len(claims), dispersion(claims), ours, fixed, per_app, others)


def medians(found: list[Comparison]) -> dict[str, object]:
    """Several demands together: the median of each policy's figures, and of their ratios."""
    policies = {
        "planned_shared": [one.planned for one in found],
        "fixed_same_cost": [one.same_cost.result for one in found],
        "per_app": [one.best_per_app.result for one in found],
    }
    ratios = [one.planned.idle_hours / one.best_per_app.result.idle_hours for one in found]
    gained = [one.planned.service - one.same_cost.result.service for one in found]
    return {
        "runs": len(found),
        "policies": {
            name: {
                "served_at_once": round(median(one.service for one in results), 5),
                "idle_machine_hours": round(median(one.idle_hours for one in results), 1),
                "cost": round(median(one.cost for one in results), 2),
            }
            for name, results in policies.items()
        },
        "idle_ratio_to_per_app": round(median(ratios), 4),
        "served_more_than_fixed": [round(one, 5) for one in gained],
    }


def _rates_s(claims: list[Claim], shape: DemandShape) -> list[float]:
    counts = [0] * shape.apps
    for claim in claims:
        counts[claim.app] += 1
    return [count / (shape.days * 86_400) for count in counts]
