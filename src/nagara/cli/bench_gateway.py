"""`nagara bench gateway`: what the gateway adds to requests, and how many it can pass on.

The same small server twice: as an app behind the gateway, and as a process that is asked
directly. Latencies are taken in turns, so that what else the machine does meets both; differences
are formed within a round. The load comes from processes of their own: requests at fixed moments
from `bench_load`, the highest throughput by wrk if that is installed.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json
from nagara.cli.instance import Instance, own_instance
from nagara.cli.settings import Settings

RATE = 500
_APP = "bench"
_STREAMS = 20
_CONNECTIONS = 64
_CAPTURE_S = 120.0
_UPSTREAM = [sys.executable, "-m", "nagara.cli.bench_upstream"]


@click.command()
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Of each case."
)
@click.option(
    "--seconds", default=4.0, show_default=True, type=click.FloatRange(min=0.5),
    help="Length of each part of a round.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def gateway(settings: Settings, rounds: int, seconds: float, as_json: bool) -> None:
    """Measure what the gateway adds to a request, its throughput, and a start from zero."""
    with own_instance(settings.state, "bench") as instance, _direct() as direct:
        instance.admin.deploy(_app_file(), "bench")
        _get(instance, "/health")
        figures = {
            "rate": RATE,
            **_latencies(instance, direct, rounds, seconds),
            **_streams(instance, direct, rounds, seconds),
            **_throughput(instance, direct, seconds),
            **_from_zero(instance, rounds),
        }
    if as_json:
        print_json(figures)
        return
    click.echo(
        f"added at {RATE} requests/s: p50 {figures['added_p50_ms']:.2f} ms, "
        f"p99 {figures['added_p99_ms']:.2f} ms; {figures['errors']} errors\n"
        f"throughput: {figures['requests_per_s']:.0f} requests/s ({figures['load_by']}; "
        f"the server itself {figures['direct_requests_per_s']:.0f})\n"
        f"streamed tokens: {figures['token_delay_p50_ms']:.2f} ms later\n"
        f"from zero ({figures['from_zero_kind']}): {figures['from_zero_extra_ms']:.1f} ms "
        "beside the stages"
    )


def _app_file() -> str:
    command = json.dumps([*_UPSTREAM, "${PORT}"])
    return (
        f'[app.{_APP}]\nimage = "host"\ncommand = {command}\nready = "/health"\n'
        'scale = {min = 0, max = 1, concurrency = 1000, idle = "15m"}\n'
    )


@contextmanager
def _direct() -> Iterator[str]:
    """The address of the same server without anything before it."""
    process = subprocess.Popen(
        [*_UPSTREAM, "0"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _load(url: str, path: str, key: str | None, seconds: float, **how: float) -> dict[str, Any]:
    job = {"url": url, "path": path, "key": key, "seconds": seconds, **how}
    done = subprocess.run(
        [sys.executable, "-m", "nagara.cli.bench_load"],
        input=json.dumps(job), capture_output=True, text=True, check=False,
        timeout=seconds + 120,
    )  # fmt: skip
    if done.returncode:
        raise NagaraError(f"the load generator failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _latencies(instance: Instance, direct: str, rounds: int, seconds: float) -> dict[str, Any]:
    added: dict[str, list[float]] = {"p50": [], "p99": []}
    whole: list[float] = []
    errors = 0
    for number in range(rounds):
        click.echo(f"latency: round {number + 1} of {rounds}", err=True)
        without = _load(direct, "/wait", None, seconds, rate=RATE)
        through = _load(instance.url, f"/{_APP}/wait", instance.key, seconds, rate=RATE)
        errors += without["errors"] + through["errors"]
        for name, share in (("p50", 0.50), ("p99", 0.99)):
            difference = _quantile(through["latencies_ms"], share)
            added[name].append(difference - _quantile(without["latencies_ms"], share))
        whole += through["latencies_ms"]
    return {
        "added_p50_ms": round(statistics.median(added["p50"]), 3),
        "added_p99_ms": round(statistics.median(added["p99"]), 3),
        "added_p50_ms_range": [round(min(added["p50"]), 3), round(max(added["p50"]), 3)],
        "added_p99_ms_range": [round(min(added["p99"]), 3), round(max(added["p99"]), 3)],
        "through_p50_ms": round(_quantile(whole, 0.5), 3),
        "errors": errors,
    }


def _streams(instance: Instance, direct: str, rounds: int, seconds: float) -> dict[str, Any]:
    later, errors = [], 0
    for number in range(rounds):
        click.echo(f"streams: round {number + 1} of {rounds}", err=True)
        without = _load(direct, "/stream", None, seconds, streams=_STREAMS)
        path = f"/{_APP}/stream"
        through = _load(instance.url, path, instance.key, seconds, streams=_STREAMS)
        if not (through["delays_ms"] and without["delays_ms"]):
            raise NagaraError(f"no event arrived; {through['errors']} streams failed")
        errors += without["errors"] + through["errors"]
        difference = _quantile(through["delays_ms"], 0.5) - _quantile(without["delays_ms"], 0.5)
        later.append(difference)
    return {
        "token_delay_p50_ms": round(statistics.median(later), 3),
        "token_delay_p50_ms_range": [round(min(later), 3), round(max(later), 3)],
        "stream_errors": errors,
    }


def _throughput(instance: Instance, direct: str, seconds: float) -> dict[str, Any]:
    click.echo("throughput", err=True)
    wrk = shutil.which("wrk")
    if wrk is None:
        raise NagaraError("wrk is not installed", hint="it is a package of that name")
    own = _wrk(wrk, f"{instance.url}/{_APP}/fast", instance.key, seconds)
    without = _wrk(wrk, f"{direct}/fast", None, seconds)
    return {
        "requests_per_s": own,
        "direct_requests_per_s": without,
        "connections": _CONNECTIONS,
        "load_by": Path(wrk).name,
    }


def _wrk(wrk: str, url: str, key: str | None, seconds: float) -> float:
    command = [wrk, "-t", "1", "-c", str(_CONNECTIONS), "-d", f"{max(1, round(seconds))}s"]
    if key is not None:
        command += ["-H", f"Authorization: Bearer {key}"]
    done = subprocess.run(
        [*command, url], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    if bad := re.search(r"(Non-2xx|Socket errors).*", done.stdout):
        raise NagaraError(f"wrk: {bad[0]}")
    found = re.search(r"Requests/sec: +([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def _from_zero(instance: Instance, rounds: int) -> dict[str, Any]:
    """From a request to the first byte of its answer, less the stages of the start it waited for.

    Restored, if this machine can save replicas.
    """
    click.echo("from zero", err=True)
    if instance.admin.status()["can_snapshot"]:
        instance.admin.wait_for_capture(_APP, timeout_s=_CAPTURE_S)
    extras, kinds = [], set()
    for _ in range(rounds):
        instance.admin.fold(_APP)
        first_byte_s = _get(instance, "/fast")
        start = instance.last_start(_APP)
        stages = sum(value for name, value in start["stages"].items() if name != "unaccounted")
        extras.append(1000 * (first_byte_s - stages))
        kinds.add(start["kind"])
    return {
        "from_zero_extra_ms": round(statistics.median(extras), 2),
        "from_zero_extra_ms_range": [round(min(extras), 2), round(max(extras), 2)],
        "from_zero_kind": "+".join(sorted(kinds)),
    }


def _get(instance: Instance, path: str) -> float:
    """Seconds to the first byte of an answer."""
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{instance.url}/{_APP}{path}", headers={"Authorization": f"Bearer {instance.key}"}
    )
    begun_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        answer.read(1)
        return time.perf_counter() - begun_s


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
