"""The planner's question out of what the pool sees."""

import pytest

from nagara.pool.demandclass import ANY, DemandClass
from nagara.pool.meters import Meters
from nagara.pool.planner import make_plan
from nagara.pool.sizing import Policy, make_problem
from nagara.pool.solver import solve
from nagara.testing.pools import a_core, an_offering, make_ready

POLICY = Policy(least_free=3, spare_machines=0)
OWN = an_offering(
    "local", provider="local", region="local", type="any", devices=1, stock=0, price_h=0.0
)


def planned(wanted: DemandClass, *offerings: object) -> dict[str, int]:
    core, meters = a_core(own=OWN), Meters()
    meters.expect(wanted, 0.0)
    problem = make_problem(core, offerings, meters, POLICY, 0.0)  # type: ignore[arg-type]
    return dict(make_plan(problem, solve).launches)


def test_a_machine_that_costs_nothing_does_not_make_shortages_worthless() -> None:
    assert planned(ANY, an_offering()) == {"a": 1}


def test_a_shortage_is_weighed_by_the_prices_of_what_would_end_it() -> None:
    cheap = an_offering("cpu", type="cpu", price_h=0.01)
    dear = an_offering("gpu", type="h100", price_h=9.0)
    assert planned(DemandClass(frozenset({"h100"})), cheap, dear) == {"gpu": 1}


def test_the_own_machine_is_neither_launched_nor_given_back() -> None:
    core, meters = a_core(own=OWN), Meters()
    problem = make_problem(core, (), meters, POLICY, 0.0)
    (offer,) = problem.offers
    assert (offer.idle, offer.supply, offer.inventory) == (0, 0, 1)


def test_an_app_that_was_only_deployed_has_the_least_reserve() -> None:
    meters = Meters()
    assert meters.expect(ANY, 0.0)
    assert not meters.expect(ANY, 5.0)
    (demand,) = make_problem(a_core(), (an_offering(),), meters, POLICY, 0.0).demands
    assert demand.quantity / POLICY.utilisation == pytest.approx(3)


def test_a_machine_that_has_long_been_silent_is_made_up_for() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    core.heard(name, 100.0)
    core.silent(name)

    def inventory(now_s: float) -> int:
        (offer,) = make_problem(core, (an_offering(),), Meters(), POLICY, now_s).offers
        return offer.inventory

    assert (inventory(150.0), inventory(161.0)) == (1, 0)
    core.marked(name, 5.0, 170.0)
    assert inventory(170.0) == 1
