"""`nagara pool`: the machines, the plan and why, a simulated week, this machine's health.

`status`, `plan`, `explain` and `drain` speak with the pool through its record in the state folder,
which is there whether or not the process that owns it runs. `simulate` and `diagnose` need none.
"""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import click

from nagara.cli.bench_report import print_json
from nagara.cli.settings import Settings
from nagara.pool.errors import PoolError
from nagara.pool.ledger import SqliteLedger
from nagara.pool.states import MachineState


@click.group()
def pool() -> None:
    """Show and steer the machines that are kept ready."""


def _record(settings: Settings, *, readonly: bool = True) -> SqliteLedger:
    path = settings.state / "pool.db"
    if not path.exists():
        raise PoolError(
            "there is no pool here yet",
            where=str(path),
            hint="`nagara up` with a pool file keeps one; --state names another place",
        )
    return SqliteLedger(path, readonly=readonly)


@pool.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, as_json: bool) -> None:
    """List the machines, their states and leases."""
    record = _record(settings)
    saved = record.read()
    leased: dict[str, int] = {}
    for lease in saved.leases:
        if lease.app is not None:
            name = lease.slot.rpartition("/")[0]
            leased[name] = leased.get(name, 0) + lease.wanted.devices
    machines = [
        {
            "name": row.name,
            "state": row.state,
            "offering": row.offering.id,
            "type": row.offering.type,
            "region": row.offering.region,
            "devices": row.offering.devices,
            "leased": leased.get(row.name, 0),
            "price_h": row.offering.price_h,
            "reason": row.reason,
        }
        for row in saved.machines
    ]
    figures = record.fact("figures") or {}
    if as_json:
        click.echo(json.dumps({"pool": saved.pool, "machines": machines, **figures}, indent=2))
        return
    for machine in machines:
        reason = f"  ({machine['reason']})" if machine["reason"] else ""
        click.echo(
            f"{machine['name']:<28} {machine['state']:<12} "
            f"{machine['leased']}/{machine['devices']} {machine['type']:<8} "
            f"{machine['offering']}{reason}"
        )
    ready = sum(row.state is MachineState.READY for row in saved.machines)
    click.echo(f"{len(machines)} machines, {ready} ready", err=True)
    for name, value in figures.items():
        click.echo(f"{name}: {value}", err=True)


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
@click.pass_obj
def explain(settings: Settings, file: Path | None) -> None:
    """Say in words why the plan is what it is."""
    for line in _plan(settings, file)["words"]:
        click.echo(line)


def _plan(settings: Settings, file: Path | None) -> dict[str, list]:  # type: ignore[type-arg]
    if file is None:
        document = _record(settings).fact("plan")
        if document is None:
            raise PoolError("no plan has been made yet", hint="--file plans from a pool file")
        return dict(document)
    from nagara.pool.poolfile import plan_of_file, read_pool_file

    return asyncio.run(plan_of_file(read_pool_file(file), settings.state))


@pool.command()
@click.argument("machine")
@click.option("--resume", is_flag=True, help="Take it back into use instead.")
@click.pass_obj
def drain(settings: Settings, machine: str, resume: bool) -> None:
    """Give MACHINE no new leases; with --resume, give it some again.

    The order is left in the pool's record; the process that owns the pool carries it out within
    a second or so, or when it is started next.
    """
    record = _record(settings, readonly=False)
    states = {row.name: row.state for row in record.read().machines}
    if machine not in states:
        raise PoolError(f"no machine is called {machine!r}", hint="`nagara pool status` lists them")
    allowed = MachineState.DRAINING if resume else MachineState.READY
    if states[machine] is not allowed:
        raise PoolError(f"it is {states[machine]}, not {allowed}", where=machine)
    record.add_order(machine, "resume" if resume else "drain")
    click.echo(f"{machine}: {'resume' if resume else 'drain'} ordered")


@pool.command()
@click.option("--days", default=7.0, show_default=True, help="Length of the simulated time.")
@click.option("--apps", default=50, show_default=True, help="How many apps claim slots.")
@click.option("--dispersion", default=20.0, show_default=True, help="Of claims per minute.")
@click.option("--claims-per-hour", default=600.0, show_default=True, help="Of all apps together.")
@click.option("--seed", default=1, show_default=True, help="Another seed, another week.")
@click.option("--service", type=float, help="Quantile the reserve is sized for  [default: 0.97].")
@click.option("--no-variants", is_flag=True, help="Leave stock-outs and lying providers out.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw FILE.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    days: float, apps: int, dispersion: float, claims_per_hour: float, seed: int,
    service: float | None, no_variants: bool, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Simulate days of bursty demand: this pool's planner against fixed and per-app reserves."""
    from nagara.pool.simulate.claims import DemandShape
    from nagara.pool.simulate.comparison import compare
    from nagara.pool.simulate.picture import draw
    from nagara.pool.sizing import Policy
    from nagara.pool.solver import solve

    if plot is not None and plot.suffix != ".svg":
        raise click.UsageError("--plot draws SVG: name the file FILE.svg")
    shape = DemandShape(days, apps, dispersion, claims_per_hour, seed=seed)
    policy = Policy() if service is None else Policy(service=service)
    found = compare(
        shape, solve, policy, lambda text: click.echo(text, err=True), variants=not no_variants
    )
    if plot is not None:
        title = f"simulated: {apps} apps, {days:g} days, planned shared pool"
        plot.write_text(draw(found.planned, title))
    document = {"demand": asdict(shape), "policy": asdict(policy), **found.document()}
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


@pool.command()
@click.option(
    "--kind", type=click.Choice(["boot", "medium", "heavy"]), default="boot", show_default=True,
    help="How thoroughly.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def diagnose(settings: Settings, kind: str, as_json: bool) -> None:
    """Run the health checks on this machine. Exit code 1 if one fails."""
    from nagara.contract.machine import CheckKind, Outcome
    from nagara.pool.health.machine import check_machine

    report = asyncio.run(check_machine(CheckKind(kind), settings.state))
    if as_json:
        print_json(asdict(report))
    else:
        for result in report.results:
            click.echo(
                f"{result.outcome:<12} {result.name:<20} {result.elapsed_s:7.2f} s  {result.detail}"
            )
    if any(result.outcome is Outcome.FAIL for result in report.results):
        raise SystemExit(1)
