"""`nagara bench autoscale`: a trace of requests replayed through the decision that `up` runs.

Everything is simulated but the decision and the pool: time, requests and starts.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nagara.cli.bench_report import print_json
from nagara.cli.text_file import read_text_file
from nagara.control.replay.arrivals import GENERATORS, Request, generated
from nagara.control.replay.comparison import Figures, Replay, Rival, compare
from nagara.pool.simulate.trace import read_trace


@click.command()
@click.option(
    "--trace",
    required=True,
    metavar="FILE|gen:NAME",
    help="A recorded trace (CSV or JSON lines), or a generated hour: "
    + ", ".join(f"gen:{name}" for name in GENERATORS)
    + ".",
)
@click.option(
    "--cold-start",
    "cold_start_s",
    type=click.FloatRange(min=0.001),
    required=True,
    metavar="SECONDS",
    help="How long a start takes.",
)
@click.option(
    "--slots", type=click.IntRange(min=1), default=8, show_default=True,
    help="Requests a replica takes at a time.",
)  # fmt: skip
@click.option("--no-grid", is_flag=True, help="Rivals with their usual settings only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def autoscale(trace: str, cold_start_s: float, slots: int, no_grid: bool, as_json: bool) -> None:
    """Replay a trace in simulated time: nagara's scaling beside others by their published rules."""
    replay = Replay(_requests(trace), slots, cold_start_s)
    found = compare(replay, lambda text: click.echo(text, err=True), grids=not no_grid)
    own: Figures = found.pop("nagara")
    hindsight = found.pop("hindsight", None)
    if as_json:
        policies: dict[str, Any] = {"nagara": asdict(own)}
        policies |= {name: _document(rival, own) for name, rival in found.items()}
        print_json(
            {
                "trace": trace, "requests": len(replay.requests), "cold_start_s": cold_start_s,
                "slots": slots, "is_simulated": True, "policies": policies,
                "hindsight": None if hindsight is None else _document(hindsight, own),
            }
        )  # fmt: skip
        return
    click.echo(f"simulated: {len(replay.requests)} requests, a start takes {cold_start_s:g} s")
    click.echo(f"{'':28}   wait p50     p95     p99  device-seconds  starts  utilisation")
    _row("nagara", own)
    for name, rival in found.items():
        _row(name, rival.usual)
        if rival.best is not None:
            _row(f"  nearest of {rival.tried}", rival.best)
            click.echo(f"    {_settings(rival)}; better in both: {rival.better_in_both}")
    if hindsight is not None:
        _row("no rival: a constant number", hindsight.usual)
        click.echo(f"    {_settings(hindsight)}, chosen knowing the trace")


def _requests(trace: str) -> list[Request]:
    kind, _, name = trace.partition(":")
    if kind == "gen":
        return generated(name)
    return read_trace(read_text_file(Path(trace)).splitlines(), trace)


def _document(rival: Rival, own: Figures) -> dict[str, Any]:
    document = {**asdict(rival.usual), "settings": rival.settings}
    document["is_better_in_both"] = rival.usual.is_better(own)
    if rival.best is not None:
        document["grid"] = {
            "tried": rival.tried, "better_in_both": rival.better_in_both,
            "nearest": {**asdict(rival.best), "settings": rival.best_settings},
        }  # fmt: skip
    return document


def _settings(rival: Rival) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in (rival.best_settings or {}).items())


def _row(name: str, figures: Figures) -> None:
    click.echo(
        f"{name:28} {figures.wait_p50_s:8.2f} s {figures.wait_p95_s:5.2f} s "
        f"{figures.wait_p99_s:5.2f} s {figures.device_seconds:14.0f} {figures.starts:8}"
        f" {100 * figures.allocation_utilisation:10.1f} %"
    )
