"""What every measurement's JSON carries besides its figures, and the way it is printed."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nagara import __version__


def report(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with nagara's version, the machine and the command that made them."""
    return {
        "nagara": __version__,
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        },
        "command": " ".join(["nagara", *sys.argv[1:]]),
        **figures,
    }


def print_json(figures: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(report(figures), indent=2))


def spread(values_s: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of several runs, in seconds."""
    return {
        "median_s": round(statistics.median(values_s), 4),
        "min_s": round(min(values_s), 4),
        "max_s": round(max(values_s), 4),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
