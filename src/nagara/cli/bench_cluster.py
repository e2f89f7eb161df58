"""`nagara bench cluster`: starts on machines that have nothing of the app.

A laboratory of machines (`lab_machines`) on this host. The first has image, model and snapshot;
each measured start is on a machine that is new and has none of it, and gets what it needs from the
first over a link bounded to 10 and to 1 Gbit/s. In turns with them the same app is started on the
first machine from the same snapshot, with warm caches. Memory, CPU and disk are those of one host.

A local start fills the memory of the replica that has just ended. Before each of the others so
much is taken and given back (`touched_bytes`) that they find memory in the same state: where this
host is a virtual machine whose own host takes free memory back, the first touch of a page costs
several times what it takes to fill it.

    hop_p50_ms   what a request through the gateway to a replica of another machine takes more
                 than one to a replica of the gateway's machine; medians, in turns
"""

import http.client
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import NagaraError
from nagara.base.spans import STAGES
from nagara.cli.bench_report import print_json, report, spread
from nagara.cli.example_app import engine_app, own_image
from nagara.cli.instance import Instance, Reply
from nagara.cli.lab_cluster import LabCluster, running_cluster
from nagara.cli.lab_machines import LabMachine, laboratory
from nagara.cli.settings import Settings

LINKS_GBIT_S = (10.0, 1.0)
_APP = "cluster"
_QUESTION = "What is the capital of France?"
_MAX_TOKENS = 8
_CAPTURE_S = 1200.0
_HOP_ROUNDS, _HOP_REQUESTS = 4, 200
_TOUCHED_BYTES = 2 << 30  # more than a start fills, and less than the kernel writes out at once
_STAGES = (*STAGES, "unaccounted")

_progress = Console(stderr=True)


@dataclass(slots=True)
class Starts:
    """Restored starts of one kind."""

    first_token_s: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Medians of the stages beside those of the whole."""
        stages = {
            name: round(statistics.median(float(one["stages"][name]) for one in self.records), 4)
            for name in _STAGES
        }
        totals = [one["total_s"] for one in self.records]
        after = [whole - total for whole, total in zip(self.first_token_s, totals, strict=True)]
        return {
            "restored_s": round(statistics.median(self.first_token_s), 4),
            **{f"restored_{key}": value for key, value in spread(self.first_token_s).items()},
            "stages": stages,
            "first_token_after_ready_s": round(statistics.median(after), 4),
            "fetched_bytes": int(statistics.median(map(_fetched_bytes, self.records))),
        }


def _fetched_bytes(record: dict[str, Any]) -> int:
    """From the zone, until the replica was ready: what its image's and models' daemon says."""
    tiers = (record["files"] or {}).get("tiers") or ()
    return sum(int(one["size_bytes"]) for one in tiers if one["tier"].startswith("zone@"))


@click.command()
@click.option(
    "--machines", default=3, show_default=True, type=click.IntRange(min=2), help="So many."
)
@click.option("--app", default="smollm2", show_default=True, help="A model that was added.")
@click.option(
    "--runs", default=3, show_default=True, type=click.IntRange(min=1), help="Of each case."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def cluster(settings: Settings, machines: int, app: str, runs: int, as_json: bool) -> None:
    """Start an app on machines that have nothing of it, over bounded links."""
    with _cluster(settings.state, machines) as running:
        figures = {"app": app, "machines": machines, "runs": runs, **_measure(running, app, runs)}
    if as_json:
        print_json(figures)
    else:
        Console(highlight=False).print(_table(report(figures)))


@contextmanager
def _cluster(state: Path, machines: int) -> Iterator[LabCluster]:
    """What was imported once stays in the user's store, which the first machine uses."""
    (state / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
    with laboratory(state, machines) as lab:
        made = LabCluster(lab, state, devices=1, own_slots=2)
        (lab.machines[0].state / "store").symlink_to((state / "store").resolve())
        with running_cluster(made):
            try:
                yield made
            except NagaraError:
                kept = state / "bench-cluster-logs"
                shutil.rmtree(kept, ignore_errors=True)
                for machine in lab.machines:
                    for log in machine.folder.glob("*.log"):
                        kept.mkdir(exist_ok=True)
                        shutil.copyfile(log, kept / f"{machine.folder.name}-{log.name}")
                _progress.print(f"what the machines said is in {kept}")
                raise


def _measure(running: LabCluster, model: str, runs: int) -> dict[str, Any]:
    instance = running.instance()
    _progress.print("importing the image")
    app = engine_app(_APP, model, image=own_image(), max_replicas=2)
    instance.admin.deploy(app, "cluster")
    running.until_ready(len(running.others))
    running.only(running.first)
    _progress.print("making the snapshot")
    answers = {_ask(instance, model).text}
    capture = instance.admin.wait_for_capture(_APP, timeout_s=_CAPTURE_S)
    if capture["state"] != "done":
        raise NagaraError(f"no snapshot was made: {capture['reason']}")
    _local_start(running, model, Starts())
    running.until_touches_known(_APP)
    local = Starts()
    links = []
    for gbit_s in LINKS_GBIT_S:
        far = Starts()
        for _ in range(runs):
            answers.add(_local_start(running, model, local))
            answers.add(_far_start(running, gbit_s, model, far))
        links.append({"gbit_s": gbit_s, **far.figures()})
    hop_ms = _hop_ms(running, model)
    here = local.figures()
    for link in links:
        link["ratio"] = round(link["restored_s"] / here["restored_s"], 2)
    instance.admin.fold(_APP)
    instance.admin.delete(_APP)
    return {
        "touched_bytes": _TOUCHED_BYTES,
        "answers_equal": len(answers) == 1,
        "links": links,
        "local_restored_s": here["restored_s"],
        "local": here,
        "hop_p50_ms": hop_ms,
    }


def _local_start(running: LabCluster, model: str, starts: Starts) -> str:
    running.instance().admin.fold(_APP)
    running.only(running.first)
    return _start(running, model, starts, "locally")


def _far_start(running: LabCluster, gbit_s: float, model: str, starts: Starts) -> str:
    """On a machine that is new, and ends afterwards: what it would go on to fetch would take the
    one host's processors from the next start."""
    new = _renewed(running, running.others[0])
    new.link.shape(gbit_s)
    running.only(new)
    running.until_told(new)
    _touch_memory(running.lab.folder)
    answer = _start(running, model, starts, f"over {gbit_s:g} Gbit/s")
    running.until_told(_renewed(running, new))
    return answer


def _renewed(running: LabCluster, machine: LabMachine) -> LabMachine:
    running.instance().admin.fold(_APP)
    running.only(running.first)  # nothing is to be lost with the machine that ends now
    return running.renew(machine)


def _start(running: LabCluster, model: str, starts: Starts, how: str) -> str:
    instance = running.instance()
    reply = _ask(instance, model)
    record = instance.last_start(_APP)
    if record["kind"] != "restored" or record["replica"] != reply.replica:
        why = record["fallback"] or record["error"]
        raise NagaraError(f"was not put back {how}: {why}", where=_APP)
    starts.first_token_s.append(reply.first_token_s)
    starts.records.append(record)
    stages = " · ".join(f"{name} {record['stages'][name] * 1000:.0f}" for name in _STAGES)
    _progress.print(f"{how}: first token after {reply.first_token_s:.2f} s; {stages} ms")
    return reply.text


def _touch_memory(folder: Path) -> None:
    """Pages as the kernel's cache has them, which is what a start fills."""
    piece = bytes(4 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_TOUCHED_BYTES // len(piece)):
            file.write(piece)


def _ask(instance: Instance, model: str) -> Reply:
    return instance.chat(_APP, model, _QUESTION, max_tokens=_MAX_TOKENS)


def _hop_ms(running: LabCluster, model: str) -> float:
    """Medians of small requests, on the first machine and on another one in turns."""
    differences = []
    other = running.others[0]
    other.link.shape(LINKS_GBIT_S[0])
    for _ in range(_HOP_ROUNDS):
        found = []
        for machine in (running.first, other):
            running.instance().admin.fold(_APP)
            running.only(machine)
            _ask(running.instance(), model)
            found.append(_median_ms(running.instance()))
        differences.append(found[1] - found[0])
        _progress.print(f"a request: {found[0]:.2f} ms here, {found[1]:.2f} ms there")
    return round(statistics.median(differences), 3)


def _median_ms(instance: Instance) -> float:
    address = urlsplit(instance.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    headers = {"authorization": f"Bearer {instance.key}"}
    times_ms = []
    try:
        for _ in range(_HOP_REQUESTS):
            begun_s = time.perf_counter()
            connection.request("GET", f"/{_APP}/health", headers=headers)
            answer = connection.getresponse()
            answer.read()
            times_ms.append((time.perf_counter() - begun_s) * 1000)
            if answer.status != 200:
                raise NagaraError(f"answered {answer.status}", where=f"/{_APP}/health")
    finally:
        connection.close()
    return statistics.median(times_ms)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("restored start", "first token", "of local", *_STAGES):
        table.add_column(name, justify="left" if name == "restored start" else "right")
    rows = [("on the first machine", figures["local"], None)]
    rows += [(f"over {one['gbit_s']:g} Gbit/s", one, one["ratio"]) for one in figures["links"]]
    for name, one, ratio in rows:
        stages = (f"{one['stages'][stage] * 1000:.0f} ms" for stage in _STAGES)
        shown = "" if ratio is None else f"{ratio:.1f} x"
        table.add_row(name, f"{one['restored_s']:.2f} s", shown, *stages)
    table.add_row("one hop more", f"{figures['hop_p50_ms']:.2f} ms")
    table.add_row("answers", "equal" if figures["answers_equal"] else "DIFFER")
    return table
