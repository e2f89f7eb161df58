"""`nagara pool`: the machines, the plan and why, a simulated week, a machine's health.

`status`, `plan`, `explain`, `drain` and `diagnose MACHINE` speak with the running nagara;
`simulate`, `plan --file` and `diagnose` of this machine need none.
"""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nagara.cli.bench_report import print_json
from nagara.cli.settings import Settings
from nagara.cli.text_file import read_text_file
from nagara.control.client import connect

if TYPE_CHECKING:
    from nagara.pool.simulate.claims import Claim, DemandShape

_MARKS = (("is_kept_out", "no new leases"), ("is_silent", "does not answer"))


@click.group()
def pool() -> None:
    """Show and steer the machines that are kept ready."""


@pool.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, as_json: bool) -> None:
    """List the machines, their states and leases, and the pool in numbers."""
    document = connect(settings.state).pool()
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    machines = document["machines"]
    for machine in machines:
        notes = [machine["reason"], *(text for key, text in _MARKS if machine[key])]
        said = "; ".join(note for note in notes if note)
        click.echo(
            f"{machine['name']:<28} {machine['state']:<12} "
            f"{machine['leased']}/{machine['devices']} {machine['type']:<8} "
            f"{machine['offering']}{f'  ({said})' if said else ''}"
        )
    for alert in document["alerts"]:
        click.echo(f"alert: {alert}", err=True)
    figures = {k: v for k, v in document.items() if k not in ("pool", "machines", "alerts")}
    click.echo("  ".join(f"{name} {value}" for name, value in figures.items()), err=True)


@pool.command()
@click.option("--file", "file", type=click.Path(path_type=Path, dir_okay=False), help="Pool file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def plan(settings: Settings, file: Path | None, as_json: bool) -> None:
    """Show the latest plan, or with --file what would be planned for an empty pool now.

    Nothing is launched or given back.
    """
    document = _plan(settings, file)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for what, word in (("launches", "launch"), ("releases", "release")):
        for name, count in document[what]:
            click.echo(f"{word:<8} {count:>4}  {name}")
    for name, missing in document["shortages"]:
        click.echo(f"short    {missing:>6.1f}  {name}")
    if not document["launches"] and not document["releases"]:
        click.echo("nothing to do", err=True)


@pool.command()
@click.option("--file", "file", type=click.Path(path_type=Path, dir_okay=False), help="Pool file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def explain(settings: Settings, file: Path | None, as_json: bool) -> None:
    """Say in words why the plan is what it is: for each decision, the limits that made it."""
    document = _plan(settings, file)
    if as_json:
        chosen = {key: document[key] for key in ("source", "words", "bindings", "demands")}
        click.echo(json.dumps(chosen, indent=2))
        return
    for line in document["words"]:
        click.echo(line)


def _plan(settings: Settings, file: Path | None) -> dict[str, Any]:
    if file is None:
        return connect(settings.state).pool_plan()
    from nagara.pool.poolfile import plan_of_file, read_pool_file

    return asyncio.run(plan_of_file(read_pool_file(file), settings.state))


@pool.command()
@click.argument("machine")
@click.option("--resume", is_flag=True, help="Take it back into use instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def drain(settings: Settings, machine: str, resume: bool, as_json: bool) -> None:
    """Give MACHINE no new leases; with --resume, give it some again."""
    _say(connect(settings.state).order_machine(machine, "resume" if resume else "drain"), as_json)


def _say(answer: dict[str, Any], as_json: bool) -> None:
    text = json.dumps(answer, indent=2) if as_json else f"{answer['machine']}: {answer['state']}"
    click.echo(text)


@pool.command()
@click.option("--days", default=7.0, show_default=True, help="Length of the simulated time.")
@click.option("--apps", default=50, show_default=True, help="How many apps claim slots.")
@click.option("--dispersion", default=20.0, show_default=True, help="Of claims per minute.")
@click.option("--claims-per-hour", default=600.0, show_default=True, help="Of all apps together.")
@click.option("--seed", default=1, show_default=True, help="Another seed, another week.")
@click.option("--seeds", default=1, show_default=True, help="So many weeks, with medians.")
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False),
    help="A recorded trace of requests (CSV or JSON lines) instead of generated demand.",
)  # fmt: skip
@click.option("--service", type=float, help="Quantile the reserve is sized for  [default: 0.99].")
@click.option("--no-variants", is_flag=True, help="Leave stock-outs and lying providers out.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw FILE.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    days: float, apps: int, dispersion: float, claims_per_hour: float, seed: int, seeds: int,
    trace: Path | None, service: float | None, no_variants: bool, plot: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Simulate days of bursty demand: this pool's planner against fixed and per-app reserves."""
    from nagara.pool.simulate.claims import DemandShape
    from nagara.pool.simulate.comparison import compare, medians
    from nagara.pool.simulate.picture import draw
    from nagara.pool.sizing import Policy
    from nagara.pool.solver import solve

    if plot is not None and plot.suffix != ".svg":
        raise click.UsageError("--plot draws SVG: name the file FILE.svg")
    shape = DemandShape(days, apps, dispersion, claims_per_hour, seed=seed)
    policy = Policy() if service is None else Policy(service=service)

    def say(text: str) -> None:
        click.echo(text, err=True)

    claims = None
    if trace is not None:
        claims, shape = _recorded(trace, shape)
    found = compare(shape, solve, policy, say, variants=not no_variants, claims=claims)
    if plot is not None:
        title = f"simulated: {apps} apps, {days:g} days, planned shared pool"
        plot.write_text(draw(found.planned, title))
    document = {"demand": asdict(shape), "policy": asdict(policy), **found.document()}
    if seeds > 1 and trace is None:
        more = [replace(shape, seed=seed + number) for number in range(1, seeds)]
        every = [found, *(compare(one, solve, policy, say, variants=False) for one in more)]
        document["medians"] = medians(every)
    if as_json:
        print_json(document)
        return
    rows = [
        ("planned, shared", found.planned),
        (f"fixed, same cost ({found.same_cost.setting})", found.same_cost.result),
        (f"per app ({found.best_per_app.setting})", found.best_per_app.result),
        *found.variants.items(),
    ]
    click.echo(f"simulated; {found.claims} claims, dispersion {found.dispersion:.1f}")
    for name, result in rows:
        click.echo(
            f"{name:<52} at once {100 * result.service:6.2f} %  "
            f"idle {result.idle_hours:>9.0f} h  cost {result.cost:>10.0f}"
        )
    if "medians" in document:
        click.echo(f"medians of {seeds}: {json.dumps(document['medians'])}")


def _recorded(file: Path, shape: "DemandShape") -> tuple[list["Claim"], "DemandShape"]:
    """The claims of a trace, and the shape of demand that they have."""
    from nagara.pool.simulate.claims import dispersion
    from nagara.pool.simulate.trace import claims_of, read_trace

    requests = read_trace(read_text_file(file).splitlines(), str(file))
    claims = claims_of(requests)
    hours = max(requests[-1][0], 60.0) / 3600
    measured = max(1.0, dispersion(claims, mean_over=min(60, int(hours * 60))))
    rate_h = len(claims) / hours
    return claims, replace(
        shape, days=hours / 24, apps=1, dispersion=round(measured, 2), claims_h=round(rate_h, 2)
    )


@pool.command()
@click.argument("machine", required=False)
@click.option(
    "--kind", type=click.Choice(["boot", "medium", "heavy"]), default=None,
    help="How thoroughly  [default: boot; medium for a machine of the pool].",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def diagnose(settings: Settings, machine: str | None, kind: str | None, as_json: bool) -> None:
    """Run the health checks on this machine; exit code 1 if one fails.

    With MACHINE, order the running nagara to look at a machine of its pool: it gets no new
    leases, is looked at once it is empty, and then goes on or is taken out.
    """
    if machine is not None:
        what = f"diagnose?kind={kind or 'medium'}"
        _say(connect(settings.state).order_machine(machine, what), as_json)
        return
    from nagara.contract.machine import CheckKind, Outcome
    from nagara.pool.health.machine import check_machine

    report = asyncio.run(check_machine(CheckKind(kind or "boot"), settings.state))
    if as_json:
        print_json(asdict(report))
    else:
        for result in report.results:
            click.echo(
                f"{result.outcome:<12} {result.name:<20} {result.elapsed_s:7.2f} s  {result.detail}"
            )
    if any(result.outcome is Outcome.FAIL for result in report.results):
        raise SystemExit(1)
