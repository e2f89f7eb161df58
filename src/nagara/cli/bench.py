"""`nagara bench`: one sub-command per measurement, imported on use.

Each prints a table, or with `--json` one JSON object on standard output and nothing else there.
"""

import click

from nagara.cli.lazy_group import Entry, LazyGroup

BENCHMARKS: dict[str, Entry] = {
    "apps": Entry(
        "nagara.cli.bench_apps:apps", "What a thousand apps at zero cost the control process."
    ),
    "autoscale": Entry(
        "nagara.cli.bench_autoscale:autoscale",
        "Scaling replayed over a trace of requests, beside other ways to scale (simulated).",
    ),
    "gateway": Entry(
        "nagara.cli.bench_gateway:gateway",
        "What the gateway adds to requests, its throughput, a start from zero.",
    ),
    "planner": Entry(
        "nagara.cli.bench_planner:planner", "Plans over large catalogues, and claims of slots."
    ),
    "coldstart": Entry(
        "nagara.cli.bench_coldstart:coldstart",
        "From a request to the first token, started plainly and restored.",
    ),
    "clones": Entry(
        "nagara.cli.bench_clones:clones",
        "Many replicas put back from one snapshot at once, against one.",
    ),
    "cluster": Entry(
        "nagara.cli.bench_cluster:cluster",
        "A start on a machine that has nothing of the app, from a neighbour over a bounded link.",
    ),
    "fleet": Entry(
        "nagara.cli.bench_fleet:fleet",
        "What a thousand machines and their replicas cost the control process (simulated).",
    ),
    "rounds": Entry(
        "nagara.cli.bench_rounds:rounds",
        "Folded to zero and called by several at once, many times; what is left afterwards.",
    ),
    "files": Entry(
        "nagara.cli.bench_files:files",
        "Images and the store: index, mounts, cold and warm imports, reading.",
    ),
    "overlap": Entry(
        "nagara.cli.bench_engine:overlap",
        "How busy the device is with and without a step in flight.",
    ),
    "device": Entry(
        "nagara.cli.bench_device:device",
        "Restored starts with a (simulated) device against the bound their parts set.",
    ),
    "weights": Entry(
        "nagara.cli.bench_weights:weights",
        "Reading weights into memory against what the machine reads at all.",
    ),
    "engine": Entry(
        "nagara.cli.bench_engine:engine",
        "The engine's speed against what its linear layers alone allow.",
    ),
}


class _Benchmarks(LazyGroup):
    """A group whose measurements are imported on use."""

    entries = BENCHMARKS
    title = "Measurements"


@click.group(cls=_Benchmarks)
def bench() -> None:
    """Measure; every figure of the README comes from here."""
