"""`nagara bench device`: a restored start with a device, against the bound its parts set."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json
from nagara.snapshot.device.simulated_start import (
    GB,
    Hardware,
    Replica,
    SimulatedStart,
    simulate,
)

# bfloat16 weights; held: a context, compiled code and captured graphs; host: a server's pages.
REPLICAS = (
    Replica("8B", weights_bytes=16 * GB, host_bytes=4 * GB, held_bytes=2 * GB),
    Replica("70B", weights_bytes=140 * GB, host_bytes=5 * GB, held_bytes=3 * GB),
)
_DEFAULT = Hardware()
Command = TypeVar("Command", bound=Callable[..., Any])


def _rate(name: str, default_bytes_s: float, what: str) -> Callable[[Command], Command]:
    return click.option(
        name, type=click.FloatRange(0.001), default=default_bytes_s / GB, show_default=True,
        help=f"{what}, in GB/s.",
    )  # fmt: skip


@click.command()
@click.option(
    "--device", type=click.Choice(["sim", "cuda"]), default="sim", show_default=True,
    help="A simulated one, or the GPU that is here.",
)  # fmt: skip
@_rate("--storage", _DEFAULT.storage_bytes_s, "Reading from storage")
@_rate("--host-restore", _DEFAULT.host_restore_bytes_s, "Restoring a process's memory")
@_rate("--link", _DEFAULT.link_bytes_s, "Between host and device")
@click.option("--context-ms", type=click.FloatRange(0), default=_DEFAULT.context_s * 1000,
              show_default=True, help="Making the driver's context anew.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def device(
    device: str, storage: float, host_restore: float, link: float, context_ms: float, as_json: bool
) -> None:
    """Measure restored starts of an 8B and a 70B model; with `sim` every figure is simulated."""
    if device == "cuda":
        raise NagaraError(
            "is measured by a script that brings its own models",
            where="--device cuda",
            hint="python bench/gpu_coldstart.py",
        )
    hardware = Hardware(
        storage_bytes_s=storage * GB,
        host_restore_bytes_s=host_restore * GB,
        link_bytes_s=link * GB,
        context_s=context_ms / 1000,
    )
    starts = [simulate(replica, hardware) for replica in REPLICAS]
    if as_json:
        cases = [_case(start) for start in starts]
        parameters = asdict(hardware)
        print_json({"device": "sim", "simulated": True, "parameters": parameters, "cases": cases})
        return
    for start in starts:
        click.echo(
            f"{start.name:>4} simulated: {start.restore_s:6.2f} s "
            f"(host {start.host_s:.2f}, device {start.device_s:.2f}, weights "
            f"{start.weights_s:.2f}), bound {start.bound_s:.2f} s, ratio {start.ratio:.2f}"
        )


def _case(start: SimulatedStart) -> dict[str, Any]:
    return {
        "name": start.name,
        "simulated": True,
        "weights_bytes": start.weights_bytes,
        "restore_s": round(start.restore_s, 4),
        "bound_s": round(start.bound_s, 4),
        "ratio": round(start.ratio, 4),
        "stages": {
            "host": round(start.host_s, 4),
            "device": round(start.device_s, 4),
            "weights": round(start.weights_s, 4),
        },
    }
