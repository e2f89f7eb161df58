"""Futures sampled from what was measured."""

from nagara.pool.demandclass import ANY
from nagara.pool.meters import Meters
from nagara.pool.planner import make_plan
from nagara.pool.scenarios import radical_inverse, sample
from nagara.pool.sizing import Policy, make_problem
from nagara.pool.solver import solve
from nagara.testing.pools import a_core, an_offering


def test_digits_are_mirrored_at_the_point() -> None:
    assert [radical_inverse(n, 2) for n in (0, 1, 2, 3, 4)] == [0.0, 0.5, 0.25, 0.75, 0.125]
    assert radical_inverse(5, 3) == 2 / 3 + 1 / 9


def test_supply_comes_as_often_as_its_chance_and_one_future_has_the_whole_demand() -> None:
    futures = sample([lambda service: 100 * service], [(8, 0.7), (4, 1.0), (5, 0.0)], 0.97, 20)
    assert max(one.quantities[0] for one in futures) == 97.0
    assert 12 <= sum(one.supply[0] == 8 for one in futures) <= 16
    assert {one.supply[1] for one in futures} == {4}
    assert {one.supply[2] for one in futures} == {0}


def a_pool_asking(refused: int, granted: int) -> tuple[float, dict[str, int]]:
    """What is planned where the cheaper of two offerings was refused so often."""
    core, meters = a_core(), Meters()
    meters.expect(ANY, 0.0)
    cheap = an_offering("cheap", provider="p", region="r1", devices=1, price_h=1.0)
    safe = an_offering("safe", provider="q", region="r2", devices=1, price_h=1.1)
    for _ in range(12):
        core.supply.granted("safe", 0.0)
        core.supply.booted("safe", 0.0)
    for _ in range(refused):
        core.supply.refused("cheap", "none left", 0.0)
    for _ in range(granted):
        core.supply.granted("cheap", 0.0)
        core.supply.booted("cheap", 0.0)
    policy = Policy(least_free=8, spare_machines=0, spread=1.0)
    problem = make_problem(core, (cheap, safe), meters, policy, 1.0)
    plan = make_plan(problem, solve)
    return len(problem.scenarios), dict(plan.launches)


def test_where_orders_are_as_good_as_machines_only_the_expected_future_is_planned_for() -> None:
    scenarios, launches = a_pool_asking(refused=0, granted=20)
    assert scenarios == 0
    assert launches == {"cheap": 8}


def test_where_they_are_not_the_plan_does_not_rely_on_them() -> None:
    scenarios, launches = a_pool_asking(refused=8, granted=20)
    assert scenarios == 10
    assert launches.get("safe", 0) == 8
