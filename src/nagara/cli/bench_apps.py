"""`nagara bench apps`: what many deployed apps cost while nobody calls them."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import click

from nagara.cli.bench_report import print_json
from nagara.cli.instance import Instance, own_instance
from nagara.cli.settings import Settings
from nagara.control.client import CONTROL_FILE

_PER_FILE = 100
_SETTLE_S = 5.0


@click.command()
@click.option(
    "--count", default=1000, show_default=True, type=click.IntRange(min=1),
    help="How many apps are deployed.",
)  # fmt: skip
@click.option(
    "--seconds", default=20.0, show_default=True, type=click.FloatRange(min=2.0),
    help="How long the idle process is watched.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def apps(settings: Settings, count: int, seconds: float, as_json: bool) -> None:
    """Measure the control process with many apps, all at zero: memory, processor, decisions."""
    with own_instance(settings.state, "bench") as instance:
        click.echo(f"deploying {count} apps", err=True)
        deploy_s = _deploy(instance, count)
        time.sleep(_SETTLE_S)
        click.echo(f"watching for {seconds:g} s", err=True)
        figures = {"apps": count, "deploy_s": round(deploy_s, 2), **_idle(instance, seconds)}
    if as_json:
        print_json(figures)
        return
    click.echo(
        f"{count} apps at zero: {figures['rss_bytes'] / 1e6:.0f} MB, "
        f"{100 * figures['idle_cpu']:.1f} % of a core, a round of decisions "
        f"{figures['decision_mean_ms']:.1f} ms "
        f"(the slowest under {figures['decision_max_ms']:g} ms)"
    )


def _deploy(instance: Instance, count: int) -> float:
    begun_s = time.perf_counter()
    for first in range(0, count, _PER_FILE):
        text = "".join(
            f'[app.app-{number}]\nimage = "host"\ncommand = ["python3", "-m", "http.server"]\n'
            for number in range(first, min(count, first + _PER_FILE))
        )
        instance.admin.deploy(text, "bench")
    return time.perf_counter() - begun_s


def _idle(instance: Instance, seconds: float) -> dict[str, Any]:
    pid = json.loads((instance.state / CONTROL_FILE).read_text())["pid"]
    before, cpu_s = decisions(instance.admin.metrics()), _cpu_s(pid)
    begun_s = time.perf_counter()
    time.sleep(seconds)
    spent_s = _cpu_s(pid) - cpu_s
    elapsed_s = time.perf_counter() - begun_s
    after = decisions(instance.admin.metrics())
    rounds = after["count"] - before["count"]
    mean_s = (after["sum"] - before["sum"]) / max(1, rounds)
    return {
        "rss_bytes": _rss_bytes(pid),
        "idle_cpu": round(spent_s / elapsed_s, 4),
        "decisions": int(rounds),
        "decision_mean_ms": round(1000 * mean_s, 2),
        "decision_max_ms": 1000 * highest(before["bins"], after["bins"]),
    }


def decisions(metrics: str) -> dict[str, Any]:
    """The rounds of decisions in `/metrics`: `count`, `sum` in seconds, `bins` by upper bound."""
    bins, found = {}, {}
    for line in metrics.splitlines():
        if match := re.fullmatch(r'nagara_decision_seconds_bucket\{le="(.+)"\} (\d+)', line):
            bins[float(match[1])] = int(match[2])
        elif match := re.fullmatch(r"nagara_decision_seconds_(sum|count) (\S+)", line):
            found[match[1]] = float(match[2])
    return {"count": found.get("count", 0.0), "sum": found.get("sum", 0.0), "bins": bins}


def highest(before: dict[float, int], after: dict[float, int]) -> float:
    """The bound below which all new rounds lie."""
    new = {bound: count - before.get(bound, 0) for bound, count in after.items()}
    most = max(new.values(), default=0)
    return min((bound for bound, count in new.items() if count == most), default=0.0)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    ]
    return int(line.split()[1]) * 1024
