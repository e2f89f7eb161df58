import dataclasses
import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nagara.contract.machine import Resources
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import PlanError
from nagara.pool.explain import explain
from nagara.pool.greedy import greedy_plan
from nagara.pool.linear import TOLERANCE, LinearProgramme, Solution
from nagara.pool.model import build
from nagara.pool.planner import make_plan
from nagara.pool.problem import Demand, Offer, Plan, Problem, Rules, Scenario
from nagara.pool.solver import solve

EASY = Rules(utilisation=1.0, spread=1.0, churn_cost=0.0)


def offer(id_: str, price_h: float = 1.0, **changes: object) -> Offer:
    values: dict[str, object] = {
        "provider": "p", "region": "r", "type": "t", "devices": 1, "supply": 5,
    }  # fmt: skip
    return Offer(id=id_, price_h=price_h, **{**values, **changes})  # type: ignore[arg-type]


def demand(quantity: float, name: str = "d", *, cost: float = 100.0, **wanted: object) -> Demand:
    return Demand(name, DemandClass(**wanted), quantity, cost)  # type: ignore[arg-type]


# -- whole problems, made at random ----------------------------------------------------------

small = st.integers(0, 3)


@st.composite
def problems(draw: st.DrawFn, *, is_network: bool = False, scenarios: int = 0) -> Problem:
    """`is_network`: integral by nature, so that the programme's optimum is a whole one."""
    count = draw(st.integers(1, 4))
    offers = []
    for number in range(count):
        inventory = draw(small)
        offers.append(
            Offer(
                id=f"o{number}",
                provider=draw(st.sampled_from(["p", "q"])),
                region=draw(st.sampled_from(["r", "s"])),
                type=draw(st.sampled_from(["t", "u"])),
                devices=1 if is_network else draw(st.integers(1, 4)),
                price_h=draw(st.integers(1, 9)),
                inventory=inventory,
                in_flight=float(draw(small)),
                idle=draw(st.integers(0, inventory)),
                supply=draw(small),
                release_cost=float(draw(st.integers(0, 2))),
            )
        )
    demands = [
        Demand(
            name=f"d{number}",
            wanted=DemandClass(
                draw(st.sampled_from([None, frozenset("t"), frozenset("u")])),
                draw(st.sampled_from([(), ("r",), ("s",)])),
                1 if is_network else draw(st.integers(1, 3)),
            ),
            quantity=float(draw(st.integers(0, 9))),
            shortage_cost=float(draw(st.integers(1, 40))),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    rules = EASY if is_network else Rules(ramps=(("p", draw(st.integers(0, 4))),))
    futures = tuple(
        Scenario(
            tuple(float(draw(st.integers(0, 9))) for _ in demands),
            tuple(draw(st.integers(0, offer.supply)) for offer in offers),
        )
        for _ in range(scenarios)
    )
    return Problem(tuple(offers), tuple(demands), rules, futures)


def most_served(problem: Problem, capacity: list[int]) -> float:
    """The least cost of shortages: demand units go to machines by searching better paths."""
    order = sorted(range(len(problem.demands)), key=lambda n: -problem.demands[n].shortage_cost)
    holders: list[list[int]] = [[] for _ in problem.offers]

    def place(number: int, seen: set[int]) -> bool:
        for at, kind in enumerate(problem.offers):
            if at in seen or not problem.demands[number].wanted.accepts(kind):
                continue
            seen.add(at)
            if len(holders[at]) < capacity[at]:
                holders[at].append(number)
                return True
            for index, other in enumerate(holders[at]):
                if place(other, seen):
                    holders[at][index] = number
                    return True
        return False

    short = 0.0
    for number in order:
        for _ in range(int(problem.demands[number].quantity)):
            if not place(number, set()):
                short += problem.demands[number].shortage_cost
    return short


def brute_force(problem: Problem) -> float:
    """The least cost over every whole number of launches and releases."""
    choices = [range(-kind.idle, kind.supply + 1) for kind in problem.offers]
    best = math.inf
    for change in itertools.product(*choices):
        cost = 0.0
        for kind, step in zip(problem.offers, change, strict=True):
            cost += kind.price_h * step if step > 0 else (kind.price_h - kind.release_cost) * step
        capacity = [
            int(kind.inventory + kind.in_flight) + step
            for kind, step in zip(problem.offers, change, strict=True)
        ]
        best = min(best, cost + most_served(problem, capacity))
    return best


@settings(deadline=None, max_examples=60)
@given(problems(is_network=True))
def test_small_problems_are_solved_as_well_as_by_trying_everything(problem: Problem) -> None:
    assert make_plan(problem, solve).objective == pytest.approx(brute_force(problem), abs=1e-6)


def is_sound(problem: Problem, plan: Plan) -> None:
    """The hard limits, on the whole machines of the plan."""
    offers = {one.id: one for one in problem.offers}
    launched, released = dict(plan.launches), dict(plan.releases)
    for name, count in launched.items():
        assert 0 < count <= offers[name].supply
    for name, count in released.items():
        assert 0 < count <= offers[name].idle
    for provider, ramp in problem.rules.ramps:
        assert sum(n for name, n in launched.items() if offers[name].provider == provider) <= ramp
    both = {(offers[name].type, offers[name].region) for name in launched} & {
        (offers[name].type, offers[name].region) for name in released
    }
    assert not both


@settings(deadline=None, max_examples=120)
@given(st.one_of(problems(), problems(scenarios=2)))
def test_every_plan_keeps_its_constraints_and_proves_its_optimum(problem: Problem) -> None:
    programme = build(problem).programme
    solution = solve(programme)
    assert programme.worst_violation(solution.x) <= TOLERANCE
    # Weak duality: no point costs less than this bound, so a point that costs as much is best.
    worth = [max(0.0, one) for one in solution.row_worth]
    reduced = list(programme.cost)
    for row, value in enumerate(worth):
        for at in range(programme.starts[row], programme.starts[row + 1]):
            reduced[programme.columns[at]] += value * programme.values[at]
    bound = -sum(v * limit for v, limit in zip(worth, programme.limits, strict=True))
    for cost, upper in zip(reduced, programme.upper, strict=True):
        if cost < -1e-7:
            assert math.isfinite(upper)
            bound += cost * upper
    assert programme.objective(solution.x) == pytest.approx(bound, abs=1e-5)
    is_sound(problem, make_plan(problem, solve))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_greedy_plans_keep_the_same_hard_limits(problem: Problem) -> None:
    is_sound(problem, greedy_plan(problem, "test"))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_rounding_never_leaves_a_demand_shorter_than_the_programme_did(problem: Problem) -> None:
    free = dataclasses.replace(problem, rules=Rules())
    plan = make_plan(free, solve)
    launched, released = dict(plan.launches), dict(plan.releases)
    after = [
        dataclasses.replace(
            one,
            inventory=one.inventory + launched.get(one.id, 0) - released.get(one.id, 0),
            supply=0,
            idle=0,
        )
        for one in free.offers
    ]
    again = make_plan(dataclasses.replace(free, offers=tuple(after)), solve)
    costs = {one.name: one.shortage_cost for one in free.demands}

    def cost(shortages: tuple[tuple[str, float], ...]) -> float:
        return sum(costs[name] * missing for name, missing in shortages)

    assert cost(again.shortages) <= cost(plan.shortages) + 1e-3


# -- single decisions ------------------------------------------------------------------------


def test_the_cheapest_allowed_offering_is_taken() -> None:
    problem = Problem(
        (offer("cheap", 1.0, type="other"), offer("fits", 2.0), offer("dear", 3.0)),
        (demand(3.0, types=frozenset("t")),),
        EASY,
    )
    assert make_plan(problem, solve).launches == (("fits", 3),)


def test_capacity_is_never_planned_to_the_last_device() -> None:
    problem = Problem((offer("a", devices=4),), (demand(8.0),), Rules(utilisation=0.8))
    assert make_plan(problem, solve).launches == (("a", 3),)


def test_a_demand_no_place_may_serve_is_short_and_says_why() -> None:
    problem = Problem((offer("a"),), (demand(2.0, "far", regions=("eu-*",)),), EASY)
    plan = make_plan(problem, solve)
    assert plan.shortages == (("far", 2.0),)
    assert any("no offering has an allowed type" in line for line in explain(problem, plan))


def test_with_no_supply_anywhere_nothing_is_asked_for() -> None:
    problem = Problem((offer("a", supply=0),), (demand(2.0),), EASY)
    plan = make_plan(problem, solve)
    assert plan.launches == ()
    assert any("grants machines at present" in line for line in explain(problem, plan))


def test_what_is_idle_and_not_needed_is_given_back() -> None:
    problem = Problem((offer("a", inventory=5, idle=4),), (demand(2.0),), EASY)
    plan = make_plan(problem, solve)
    assert plan.releases == (("a", 3),)
    assert any("Give back 3 machines" in line for line in explain(problem, plan))


def test_prices_within_one_percent_move_nothing() -> None:
    problem = Problem(
        (offer("old", 1.00, inventory=4, idle=4), offer("new", 0.99)), (demand(4.0),),
        Rules(utilisation=1.0, spread=1.0, churn_cost=0.02),
    )  # fmt: skip
    plan = make_plan(problem, solve)
    assert (plan.launches, plan.releases) == ((), ())


def test_launch_and_release_of_one_type_in_one_region_never_stand_in_one_plan() -> None:
    problem = Problem(
        (offer("old", 5.0, inventory=4, idle=4), offer("new", 1.0)), (demand(4.0),), EASY
    )
    plan = make_plan(problem, solve)
    assert plan.launches == (("new", 4),)
    assert plan.releases == ()


def test_one_failure_domain_does_not_carry_everything_if_others_cost_little_more() -> None:
    problem = Problem(
        tuple(offer(region, 1.0 + n / 100, region=region, supply=20)
              for n, region in enumerate("xyz")),
        (demand(10.0),),
        Rules(utilisation=1.0, spread=0.4, spread_cost=0.5),
    )  # fmt: skip
    assert dict(make_plan(problem, solve).launches) == {"x": 4, "y": 4, "z": 2}


def test_a_provider_is_not_asked_for_more_than_it_takes_at_once() -> None:
    problem = Problem(
        (offer("a"), offer("b", 9.0, provider="q")), (demand(4.0),),
        dataclasses.replace(EASY, ramps=(("p", 1),)),
    )  # fmt: skip
    plan = make_plan(problem, solve)
    assert dict(plan.launches) == {"a": 1, "b": 3}
    assert any("p takes no more launches" in line for line in explain(problem, plan))


def test_claims_of_several_devices_do_not_count_on_what_they_cannot_use() -> None:
    problem = Problem((offer("a", devices=4, supply=9),), (demand(6.0, devices=3),), EASY)
    assert make_plan(problem, solve).launches == (("a", 2),)


def test_cpu_memory_and_disk_are_never_planned_to_the_last_either() -> None:
    wide = offer("a", devices=8, supply=9, resources=Resources(16, 2**40, 2**40))
    plain = demand(16.0)
    hungry = dataclasses.replace(plain, needs=Resources(cpu=4.0))
    assert make_plan(Problem((wide,), (plain,), EASY), solve).launches == (("a", 2),)
    # 16 cores × 0.85 are 3.4 replicas of 4 cores: 16 replicas want 5 machines.
    assert make_plan(Problem((wide,), (hungry,), EASY), solve).launches == (("a", 5),)
    huge = dataclasses.replace(plain, needs=Resources(memory_bytes=2**41))
    assert make_plan(Problem((wide,), (huge,), EASY), solve).shortages == (("d", 16.0),)


def test_scenarios_of_scarce_supply_make_the_plan_ask_elsewhere_too() -> None:
    problem = Problem(
        (offer("flaky", 1.0, supply=4), offer("sure", 2.0, provider="q", supply=4)),
        (demand(4.0),),
        EASY,
        (Scenario((4.0,), (4, 4)), Scenario((4.0,), (0, 4))),
    )
    launched = dict(make_plan(problem, solve).launches)
    assert launched["sure"] == 4


def test_a_launch_that_reached_the_observed_supply_says_so() -> None:
    problem = Problem((offer("a", supply=2), offer("b", 5.0)), (demand(4.0),), EASY)
    lines = explain(problem, make_plan(problem, solve))
    assert any("no more than 2 would be granted" in line for line in lines)


# -- solvers that are wrong ------------------------------------------------------------------

PROBLEM = Problem((offer("a"),), (demand(3.0),), EASY)


def test_an_infeasible_point_called_optimal_is_not_used() -> None:
    def lies(programme: LinearProgramme) -> Solution:
        return Solution([0.0] * len(programme.cost), [0.0] * len(programme.limits), 0.0)

    with pytest.raises(PlanError, match="breaks a constraint"):
        make_plan(PROBLEM, lies)


def test_a_point_with_nan_or_of_the_wrong_length_is_not_used() -> None:
    for x in ([math.nan] * len(build(PROBLEM).programme.cost), [], [0.0]):
        with pytest.raises(PlanError):
            make_plan(PROBLEM, lambda p, x=x: Solution(x, [0.0] * len(p.limits), 0.0))  # type: ignore[misc]


def test_a_wrong_cost_is_found_out() -> None:
    def lies(programme: LinearProgramme) -> Solution:
        return dataclasses.replace(solve(programme), objective=1.0)

    with pytest.raises(PlanError, match="says the plan costs"):
        make_plan(PROBLEM, lies)
