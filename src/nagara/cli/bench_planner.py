"""`nagara bench planner`: how long plans and claims take, and what a large pool weighs."""

import random
import time
import tracemalloc
from statistics import median

import click

from nagara.cli.bench_report import print_json
from nagara.pool.actions import Granted
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.linear import TOLERANCE
from nagara.pool.model import build
from nagara.pool.planner import make_plan
from nagara.pool.simulate.throughput import big_pool, catalogue
from nagara.pool.solver import solve

CASES = ((1538, 0), (6441, 0), (1538, 20))
MACHINES = 10_000
CLAIMS = 60_000


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--runs", default=5, show_default=True, help="Runs of each case.")
def planner(as_json: bool, runs: int) -> None:
    """Measure plans over large catalogues, and claims from a pool of 10,000 machines."""
    cases = []
    for offerings, scenarios in CASES:
        click.echo(f"{offerings} offerings, {scenarios} scenarios", err=True)
        cases.append(_case(offerings, scenarios, runs))
    click.echo(f"claims from {MACHINES} machines", err=True)
    claims = _claims()
    if as_json:
        print_json({"runs": runs, "cases": cases, **claims})
        return
    for case in cases:
        click.echo(
            f"{case['offerings']:>6} offerings {case['scenarios']:>3} scenarios: "
            f"build {case['build_s']:.3f} s, solve {case['solve_s']:.3f} s, "
            f"whole plan {case['total_s']:.3f} s ({case['total_min_s']:.3f} to "
            f"{case['total_max_s']:.3f})"
        )
    click.echo(
        f"claims: p50 {claims['claim_p50_us']:.1f} µs, p99 {claims['claim_p99_us']:.1f} µs "
        f"(of the processor alone {claims['claim_cpu_p99_us']:.1f} µs); "
        f"{MACHINES} machines take {claims['machines_bytes'] / 1e6:.1f} MB"
    )


def _case(offerings: int, scenarios: int, runs: int) -> dict[str, float]:
    problem = catalogue(offerings, scenarios=scenarios)
    builds, solves, totals = [], [], []
    for _ in range(runs):
        begun_s = time.perf_counter()
        model = build(problem)
        built_s = time.perf_counter()
        solution = solve(model.programme)
        solved_s = time.perf_counter()
        make_plan(problem, solve)
        totals.append(time.perf_counter() - solved_s)
        builds.append(built_s - begun_s)
        solves.append(solved_s - built_s)
    assert model.programme.worst_violation(solution.x) <= TOLERANCE
    return {
        "offerings": offerings,
        "scenarios": scenarios,
        "columns": len(model.programme.cost),
        "rows": len(model.programme.limits),
        "build_s": median(builds),
        "solve_s": median(solves),
        "total_s": median(totals),
        "total_min_s": min(totals),
        "total_max_s": max(totals),
    }


def _claims() -> dict[str, float]:
    """Claims and returns at random on a pool about half full, of many classes."""
    tracemalloc.start()
    core = big_pool(MACHINES)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    source = random.Random(1)  # noqa: S311  # made-up load, no secret
    classes = [
        DemandClass(
            frozenset(f"t{one}" for one in source.sample(range(24), 3)),
            devices=source.choice((1, 1, 1, 2)),
        )
        for _ in range(50)
    ]
    leases, taken_us, cpu_us = [], [], []
    for number in range(CLAIMS):
        wanted = source.choice(classes)
        claimant = Claimant(f"app-{number % 50}")
        cpu_ns, begun_ns = time.thread_time_ns(), time.perf_counter_ns()
        granted = core.claim(claimant, wanted, 0.0)
        taken_us.append((time.perf_counter_ns() - begun_ns) / 1000)
        cpu_us.append((time.thread_time_ns() - cpu_ns) / 1000)
        if isinstance(granted, Granted):
            leases.append(granted.lease)
        if len(leases) > MACHINES * 4:
            at = source.randrange(len(leases))
            leases[at], leases[-1] = leases[-1], leases[at]
            core.give_back(leases.pop(), 0.0, is_confirmed=True)
        if number % 1000 == 0:
            core.take_writes()
    taken_us.sort()
    cpu_us.sort()
    return {
        "claim_p50_us": taken_us[len(taken_us) // 2],
        "claim_p99_us": taken_us[int(0.99 * len(taken_us))],
        # The same without the time in which this process had no core.
        "claim_cpu_p99_us": cpu_us[int(0.99 * len(cpu_us))],
        "machines": MACHINES,
        "machines_bytes": held_bytes,
    }
