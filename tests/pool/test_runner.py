import sys
import time

import pytest

from nagara.pool.demandclass import DemandClass
from nagara.pool.problem import Demand, Offer, Plan, Problem, Rules
from nagara.pool.runner import Runner, Steadiness, fallback

PROBLEM = Problem(
    (Offer("a", "p", "r", "t", 1, 1.0, supply=5),),
    (Demand("d", DemandClass(), 3.0, 100.0),),
    Rules(utilisation=1.0),
)


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def test_a_plan_comes_from_a_process_of_its_own() -> None:
    plan = await Runner().plan(PROBLEM)
    assert (plan.source, plan.launches) == ("optimal", (("a", 3),))


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import time; time.sleep(60)", "longer than"),
        ("import os; os.abort()", "ended"),
        ("raise SystemExit('broken')", "broken"),
    ],
)
async def test_a_solver_that_hangs_or_dies_costs_one_plan(code: str, note: str) -> None:
    begun_s = time.monotonic()
    plan = await Runner(limit_s=1.0, child=child(code)).plan(PROBLEM)
    assert plan.source == "greedy"
    assert plan.launches == (("a", 3),)
    assert note in plan.note
    assert time.monotonic() - begun_s < 30


async def test_a_missing_solver_process_is_no_reason_to_stop() -> None:
    plan = await Runner(child=("/nonexistent",)).plan(PROBLEM)
    assert plan.source == "greedy"


def test_the_last_plan_is_used_again_while_it_is_possible_and_enough() -> None:
    last = Plan(launches=(("a", 4),), releases=())
    assert fallback(PROBLEM, last, "x").source == "last"
    assert fallback(PROBLEM, Plan(launches=(("a", 6),)), "x").source == "greedy"
    assert fallback(PROBLEM, Plan(launches=(("gone", 1),)), "x").source == "greedy"
    assert fallback(PROBLEM, Plan(launches=(("a", 1),)), "x").launches == (("a", 3),)


def test_nothing_is_given_back_without_the_optimum() -> None:
    last = Plan(launches=(("a", 4),), releases=(("a", 1),))
    assert fallback(PROBLEM, last, "x").releases == ()


def test_a_release_needs_the_same_verdict_three_times_running() -> None:
    steady, wants = Steadiness(), Plan(releases=(("a", 2),))
    assert steady.releases(wants) == ()
    assert steady.releases(Plan(releases=(("a", 1),))) == ()
    assert steady.releases(wants) == (("a", 1),)
    assert steady.releases(Plan(releases=(("a", 1),))) == ()
    steady.releases(Plan(releases=(("b", 1),)))
    assert steady.releases(wants) == ()


def test_a_plan_without_the_solver_ends_the_row_of_verdicts() -> None:
    steady, wants = Steadiness(), Plan(releases=(("a", 2),))
    steady.releases(wants)
    steady.releases(wants)
    steady.releases(Plan(source="greedy"))
    assert steady.releases(wants) == ()
