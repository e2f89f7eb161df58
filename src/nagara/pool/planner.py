"""From a problem to a plan in whole machines. Pure: no clock, no I/O, one solver call.

Every solution is held against the programme itself before it is used: a solver that calls an
infeasible point optimal is found out here.
"""

import math
from collections import defaultdict
from collections.abc import Callable

from nagara.pool.errors import PlanError
from nagara.pool.linear import TOLERANCE, LinearProgramme, Solution
from nagara.pool.model import Model, build
from nagara.pool.problem import Binding, Plan, Problem

Solver = Callable[[LinearProgramme], Solution]
_SMALL = 1e-5  # machines and devices


def make_plan(problem: Problem, solver: Solver) -> Plan:
    """The optimal plan, rounded.

    Raises:
        PlanError: the solver gave none, or one that breaks its own constraints.
    """
    model = build(problem)
    solution = solver(model.programme)
    check(model.programme, solution)
    launches, releases = _round(problem, model, solution.x)
    stage_count = len(model.stages)
    shortages = []
    for number, demand in enumerate(problem.demands):
        missing = sum(solution.x[stage.shortage[number]] for stage in model.stages) / stage_count
        if missing > _SMALL:
            shortages.append((demand.name, missing))
    return Plan(
        launches=_named(problem, launches),
        releases=_named(problem, releases),
        shortages=tuple(shortages),
        bindings=tuple(_bindings(problem, model, solution)),
        objective=solution.objective,
    )


def check(programme: LinearProgramme, solution: Solution) -> None:
    """Holds a solution against its programme; raises `PlanError`."""
    worst = programme.worst_violation(solution.x)
    if worst > TOLERANCE:
        raise PlanError(f"the solver's plan breaks a constraint by {worst:.3g}")
    objective = programme.objective(solution.x)
    if abs(objective - solution.objective) > 1e-6 * (1 + abs(objective)):
        raise PlanError(
            f"the solver says the plan costs {solution.objective:.6g}, it costs {objective:.6g}"
        )


def _named(problem: Problem, counts: dict[int, int]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (problem.offers[number].id, count) for number, count in sorted(counts.items()) if count
    )


def _round(problem: Problem, model: Model, x: list[float]) -> tuple[dict[int, int], dict[int, int]]:
    """Launches up to what each group lacks, releases down, never both of one type and region."""
    launches: dict[int, int] = {}
    rounded_up: list[tuple[float, int]] = []
    for group in model.groups:
        parts = {
            number: x[model.launch[number]] for number in group.offers if number in model.launch
        }
        whole = {number: math.floor(part + _SMALL) for number, part in parts.items()}
        lacking = math.ceil(sum(parts.values()) - _SMALL) - sum(whole.values())
        by_fraction = sorted(parts, key=lambda number: whole[number] - parts[number])
        for number in by_fraction:
            if lacking > 0 and whole[number] < problem.offers[number].supply:
                rounded_up.append((parts[number] - whole[number], number))
                whole[number] += 1
                lacking -= 1
        launches.update(whole)
    _trim_to_ramps(problem, launches, rounded_up)
    launched_at = {
        (problem.offers[number].type, problem.offers[number].region)
        for number, count in launches.items()
        if count
    }
    releases = {
        number: math.floor(x[column] + _SMALL)
        for number, column in model.release.items()
        if (problem.offers[number].type, problem.offers[number].region) not in launched_at
    }
    return launches, releases


def _trim_to_ramps(
    problem: Problem, launches: dict[int, int], rounded_up: list[tuple[float, int]]
) -> None:
    """Rounding up must not exceed what a provider takes at once: the smallest needs wait."""
    together: defaultdict[str, int] = defaultdict(int)
    for number, count in launches.items():
        together[problem.offers[number].provider] += count
    ramps = dict(problem.rules.ramps)
    for _, number in sorted(rounded_up):
        provider = problem.offers[number].provider
        if together[provider] > ramps.get(provider, math.inf):
            launches[number] -= 1
            together[provider] -= 1


def _bindings(problem: Problem, model: Model, solution: Solution) -> list[Binding]:
    """Limits that are reached. Worth is the saving by one more unit, as the solver says."""
    programme, x, worth = model.programme, solution.x, solution.row_worth
    found = []
    for number, column in model.launch.items():
        if x[column] >= programme.upper[column] - _SMALL:
            found.append(Binding("supply", problem.offers[number].id, 0.0))
    for number, column in model.release.items():
        if x[column] >= programme.upper[column] - _SMALL:
            found.append(Binding("idle", problem.offers[number].id, 0.0))

    def reached(kind: str, subject: str, row: int) -> None:
        if worth[row] > TOLERANCE:
            found.append(Binding(kind, subject, worth[row]))

    for provider, row in model.ramp_rows.items():
        reached("ramp", provider, row)
    for stage in model.stages[:1]:
        for number, row in stage.capacity_rows.items():
            reached("utilisation", model.groups[number].label, row)
        for number, row in enumerate(stage.demand_rows):
            reached("demand", problem.demands[number].name, row)
        for subject, row in stage.spread_rows:
            reached("spread", subject, row)
        for number, column in enumerate(stage.shortage):
            if x[column] > _SMALL:
                demand = problem.demands[number]
                found.append(Binding("shortage", demand.name, demand.shortage_cost))
    return found
