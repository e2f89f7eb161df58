"""`nagara bench clones`: one replica put back from a snapshot, and many of them at once.

Each run asks for one replica of the folded app, then, folded again, for many, by the app's `min`.
What is measured is the time until all are ready: from the first start's beginning to the last
one's end. Then each is sent a request, and every answer is compared.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json, report, spread
from nagara.cli.example_app import engine_app
from nagara.cli.instance import Instance, own_instance
from nagara.cli.settings import Settings

_APP = "clones"
_QUESTION = "What is the capital of France?"
_MAX_TOKENS = 8
_CAPTURE_S = 1200.0
_READY_S = 120.0
_ASK_AGAIN_S = 0.25  # answering costs the machine that is measured

_progress = Console(stderr=True)


@click.command()
@click.option("--app", default="smollm2", show_default=True, help="A model that was added.")
@click.option(
    "--clones", "count", default=8, show_default=True, type=click.IntRange(min=2),
    help="How many at once.",
)  # fmt: skip
@click.option(
    "--runs", default=3, show_default=True, type=click.IntRange(min=1), help="Of each case."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def clones(settings: Settings, app: str, count: int, runs: int, as_json: bool) -> None:
    """Many replicas put back from one snapshot at once, against one."""
    with own_instance(settings.state, "bench", slots=count + 1) as instance:
        facts = instance.admin.status()
        if not facts["can_snapshot"]:
            raise NagaraError(
                "this machine cannot save replicas", hint="missing: " + "; ".join(facts["missing"])
            )
        figures = _measure(instance, app, count, runs)
    if as_json:
        print_json(figures)
    else:
        Console(highlight=False).print(_table(report(figures)))


def _measure(instance: Instance, model: str, count: int, runs: int) -> dict[str, Any]:
    _deploy(instance, model, count, wanted=0)
    _progress.print("making the snapshot")
    answers = {_ask(instance, model)}
    capture = instance.admin.wait_for_capture(_APP, timeout_s=_CAPTURE_S)
    if capture["state"] != "done":
        raise NagaraError(f"no snapshot was made: {capture['reason']}")
    one_s: list[float] = []
    all_s: list[float] = []
    for run in range(runs):
        for at_once, found_s in ((1, one_s), (count, all_s)):
            ready_s, texts = _one_round(instance, model, count, at_once)
            found_s.append(ready_s)
            answers |= texts
            _progress.print(f"run {run + 1}/{runs}: {at_once} at once ready in {ready_s:.2f} s")
    instance.admin.fold(_APP)
    one, together = spread(one_s), spread(all_s)
    return {
        "app": model,
        "clones": count,
        "runs": runs,
        "answers_equal": len(answers) == 1,
        "one_ready": one,
        "all_ready": together,
        "ratio": round(together["median_s"] / one["median_s"], 2),
    }


def _one_round(instance: Instance, model: str, count: int, wanted: int) -> tuple[float, set[str]]:
    """From nothing to so many replicas: seconds until the last is ready, and the answers."""
    instance.admin.fold(_APP)
    before = {start["replica"] for start in instance.admin.trace(_APP)["starts"]}
    _deploy(instance, model, count, wanted=wanted)
    starts = _until_recorded(instance, before, wanted)
    begun_s = min(start["started_s"] for start in starts)
    ready_s = max(start["started_s"] + start["total_s"] for start in starts) - begun_s
    with ThreadPoolExecutor(wanted) as pool:
        asked = [pool.submit(_ask, instance, model) for _ in range(wanted)]
        texts = {request.result() for request in asked}
    _deploy(instance, model, count, wanted=0)
    return ready_s, texts


def _deploy(instance: Instance, model: str, count: int, *, wanted: int) -> None:
    """Another `min` makes no other app of it: the snapshot stays."""
    text = engine_app(_APP, model, min_replicas=wanted, max_replicas=count, concurrency=1)
    instance.admin.deploy(text, "clones")


def _until_recorded(instance: Instance, before: set[str], wanted: int) -> list[dict[str, Any]]:
    """The starts of that many replicas. Raises `NagaraError` if one was not put back."""
    deadline_s = time.monotonic() + _READY_S
    while True:
        starts = [s for s in instance.admin.trace(_APP)["starts"] if s["replica"] not in before]
        for start in starts:
            if start["kind"] != "restored":
                why = start["fallback"] or start["error"]
                raise NagaraError(f"was not put back: {why}", where=_APP)
        if len(starts) >= wanted:
            return starts
        if time.monotonic() > deadline_s:
            raise NagaraError(f"{len(starts)} of {wanted} replicas were started")
        time.sleep(_ASK_AGAIN_S)


def _ask(instance: Instance, model: str) -> str:
    return instance.chat(_APP, model, _QUESTION, max_tokens=_MAX_TOKENS).text


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=False)
    for name, key in (("one", "one_ready"), (f"{figures['clones']} at once", "all_ready")):
        times = figures[key]
        spoken = f"{times['median_s']:.2f} s ({times['min_s']:.2f} to {times['max_s']:.2f} s)"
        table.add_row(f"{name} ready in", spoken)
    table.add_row("ratio", str(figures["ratio"]))
    table.add_row("answers", "equal" if figures["answers_equal"] else "DIFFER")
    return table
