"""`nagara bench rounds`: does it hold? Again and again folded to zero, then called by several.

Each round folds the app and sends some requests at once, as `nagara demo` does in the end. Every
answer is compared with the one that a plainly started replica gave; afterwards `nagara doctor`
looks for anything left on the machine. The exit code is 1 unless all is well.
"""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json, report, spread
from nagara.cli.example_app import engine_app
from nagara.cli.instance import Instance, own_instance
from nagara.cli.progress import steps
from nagara.cli.settings import Settings

_APP = "rounds"
_QUESTIONS = (
    "Name a primary colour.",
    "What is 2 + 3?",
    "Which animal says meow?",
    "What do bees make?",
)
_MAX_TOKENS = 12
_CAPTURE_S = 1200.0
_LEAKS_S = 120.0

_progress = Console(stderr=True)


@dataclass(slots=True)
class _Tally:
    """What came of all requests."""

    first_token_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)  # of starts, by way of starting
    fallbacks: Counter[str] = field(default_factory=Counter)  # why starts were plain ones


@click.command()
@click.option("--app", default="smollm2", show_default=True, help="A model that was added.")
@click.option(
    "--rounds", "count", default=100, show_default=True, type=click.IntRange(min=1),
    help="How many times.",
)  # fmt: skip
@click.option(
    "--requests", default=4, show_default=True, type=click.IntRange(min=1),
    help="How many at once.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def rounds(settings: Settings, app: str, count: int, requests: int, as_json: bool) -> None:
    """Folded to zero and called by several at once, many times; what is left afterwards."""
    tally = _Tally()
    with own_instance(settings.state, "bench") as instance:
        _measure(instance, app, count, requests, tally)
        running = _leaks(instance.state)
    ended = _leaks(instance.state)
    leaks = [thing for thing in running if thing["answered_by"] is None] + ended
    figures = {
        "app": app,
        "rounds": count,
        "requests": requests,
        "answers": len(tally.first_token_s),
        "wrong": len(tally.wrong),
        "failed": len(tally.failed),
        "examples": (tally.failed + tally.wrong)[:5],
        "kinds": {kind: tally.kinds[kind] for kind in ("plain", "restored")},
        "fallbacks": dict(tally.fallbacks),
        "first_token": spread(tally.first_token_s or [0.0]),
        "leaks": leaks,
    }
    if as_json:
        print_json(figures)
    else:
        Console(highlight=False).print(_table(report(figures)))
    if tally.wrong or tally.failed or leaks:
        sys.exit(1)


def _measure(instance: Instance, model: str, count: int, requests: int, tally: _Tally) -> None:
    instance.admin.deploy(engine_app(_APP, model), "rounds")
    questions = [_QUESTIONS[number % len(_QUESTIONS)] for number in range(requests)]
    _progress.print("a plain start gives the answers to compare with")
    expected = {
        question: instance.chat(_APP, model, question, max_tokens=_MAX_TOKENS).text
        for question in dict.fromkeys(questions)
    }
    if instance.admin.status()["can_snapshot"]:
        capture = instance.admin.wait_for_capture(_APP, timeout_s=_CAPTURE_S)
        if capture["state"] != "done":
            raise NagaraError(f"no snapshot was made: {capture['reason']}")
    with ThreadPoolExecutor(requests) as pool, steps("round", count) as ended:
        for _ in range(count):
            instance.admin.fold(_APP)
            asked = [pool.submit(_ask, instance, model, q, expected[q], tally) for q in questions]
            served = {request.result() for request in asked}
            starts = instance.admin.trace(_APP)["starts"]
            starts = [start for start in starts if start["replica"] in served]
            tally.kinds.update(start["kind"] for start in starts)
            tally.fallbacks.update(start["fallback"] for start in starts if start["fallback"])
            ended(
                f"{len(tally.first_token_s)} answers, {len(tally.wrong)} wrong, "
                f"{len(tally.failed)} failed"
            )
    instance.admin.fold(_APP)


def _ask(instance: Instance, model: str, question: str, expected: str, tally: _Tally) -> str:
    """Asks and notes what came of it; the name of the replica that answered, or nothing."""
    try:
        reply = instance.chat(_APP, model, question, max_tokens=_MAX_TOKENS)
    except NagaraError as error:
        tally.failed.append(f"{question} {error}")
        return ""
    tally.first_token_s.append(reply.first_token_s)
    if reply.text != expected:
        tally.wrong.append(f"{question} {reply.text!r} instead of {expected!r}")
    return reply.replica


def _leaks(state: Path) -> list[dict[str, Any]]:
    """What `nagara doctor --leaks` lists for a state folder, in a process of its own."""
    command = [sys.executable, "-m", "nagara.cli.main", "--state", str(state)]
    done = subprocess.run(
        [*command, "doctor", "--leaks", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LEAKS_S,
        check=False,
    )
    try:
        owned: list[dict[str, Any]] = json.loads(done.stdout)["owned"]
    except ValueError:
        raise NagaraError(f"leaks cannot be listed: {done.stderr.strip()[-300:]}") from None
    return owned


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=False)
    wanted = figures["rounds"] * figures["requests"]
    token = figures["first_token"]
    rows = {
        "rounds": f"{figures['rounds']}, each of {figures['requests']} requests at once from zero",
        "answers": f"{figures['answers']} of {wanted}, {figures['wrong']} wrong",
        "failed": str(figures["failed"]),
        "starts": ", ".join(f"{number} {kind}" for kind, number in figures["kinds"].items()),
        "first token": f"{token['median_s']:.2f} s (up to {token['max_s']:.2f} s)",
        "left over": str(len(figures["leaks"])),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for reason, number in figures["fallbacks"].items():
        table.add_row("plain because", f"{reason} ({number} times)")
    for example in figures["examples"]:
        table.add_row("for example", example)
    return table
