"""`nagara bench overlap` and `nagara bench engine`: how busy the device is, how fast the engine."""

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json, report
from nagara.cli.settings import Settings
from nagara.engine.openmp import be_patient
from nagara.image.models import find_model


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(result: dict[str, Any], is_json: bool) -> None:
    if is_json:
        print_json(result)
        return
    whole = report(result)
    table = Table(title=whole["command"])
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in _flat(whole):
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            out += _flat(inner, f"{prefix}{name}.")
        elif prefix or name not in ("nagara", "command"):
            out.append((prefix + name, inner))
    return out


@click.command("overlap")
@click.option(
    "--device",
    type=click.Choice(["sim", "cpu", "cuda"]),
    default="sim",
    show_default=True,
    help="sim takes --step-ms for each step; cpu and cuda compute a random model.",
)
@click.option(
    "--step-ms", type=click.FloatRange(0.01), default=27.8, show_default=True,
    help="How long the simulated device takes for a step.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, 1024), default=32, show_default=True,
    help="Requests at once.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(2), default=1000, show_default=True,
    help="Of each answer.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="One JSON object on standard output.")
def overlap(device: str, step_ms: float, batch: int, tokens: int, is_json: bool) -> None:
    """Compare the engine with and without a step in flight."""
    be_patient()
    from nagara.engine.bench_overlap import run
    from nagara.engine.errors import EngineError

    try:
        result = run(device, step_ms, batch, tokens, _note)
    except EngineError as error:
        raise NagaraError(error.what, where=error.where, hint=error.hint) from error
    _print(result, is_json)


@click.command("engine")
@click.option("--model", default="smollm2", show_default=True, help="A model's name, or a folder.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Of each case.")
@click.option(
    "--depth", type=click.IntRange(0, 1), default=1, show_default=True,
    help="Steps in flight beyond the one being read.",
)  # fmt: skip
@click.option(
    "--kernel",
    type=click.Choice(["auto", "c", "torch", "transformers"]),
    default="auto",
    show_default=True,
    help="What computes.",
)
@click.option(
    "--http", "is_http", is_flag=True, help="What HTTP and tokenizing cost the step loop, instead."
)
@click.option("--json", "is_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def engine(
    state: Settings, model: str, runs: int, depth: int, kernel: str, is_http: bool, is_json: bool
) -> None:
    """Measure throughput against the bound that the linear layers alone set."""
    be_patient()
    from nagara.engine.bench_engine import PROMPTS, run_bench
    from nagara.engine.bench_http import run_http
    from nagara.engine.errors import EngineError
    from nagara.engine.settings import EngineSettings

    is_folder = Path(model).is_dir()
    folder = Path(model) if is_folder else find_model(state.models_dir, model).path
    settings = EngineSettings(dtype="bfloat16", depth=depth, kernel=kernel, max_concurrency=PROMPTS)
    try:
        result = (run_http if is_http else run_bench)(folder, settings, runs, _note)
    except EngineError as error:
        raise NagaraError(error.what, where=error.where, hint=error.hint) from error
    _print(result, is_json)
