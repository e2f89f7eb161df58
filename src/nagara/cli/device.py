"""`nagara device`: what devices this machine has for replicas, and whether they can be saved."""

import json
from collections.abc import Mapping
from dataclasses import asdict

import click

from nagara.base.errors import NagaraError
from nagara.base.units import format_bytes
from nagara.snapshot.device.errors import DeviceError
from nagara.snapshot.device.protocol import Device, DeviceFacts
from nagara.snapshot.device.replica import find_device
from nagara.snapshot.device.self_test import HELD_BYTES, self_test
from nagara.snapshot.device.simulated import SimulatedDevice

_SIMULATED_BYTES = 80 * 10**9


@click.group()
def device() -> None:
    """Show the devices of this machine, and try saving on them out."""


def _chosen(is_simulated: bool) -> Device:
    return SimulatedDevice({"sim-0": _SIMULATED_BYTES}) if is_simulated else find_device()


@device.command()
@click.option("--sim", "is_simulated", is_flag=True, help="Of the simulated device instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def status(is_simulated: bool, as_json: bool) -> None:
    """Say which devices there are, what is free on them, and what their driver can do."""
    chosen = _chosen(is_simulated)
    try:
        facts, free = chosen.facts(), chosen.free_bytes()
    except DeviceError as error:
        facts = DeviceFacts(chosen.kind, "none", {}, can_save=False, why_not=error.what)
        free = {}
    if as_json:
        devices = [
            {
                "uuid": uuid,
                "name": (facts.names or {}).get(uuid),
                "memory_bytes": size,
                "free_bytes": free.get(uuid),
            }
            for uuid, size in facts.memory_bytes.items()
        ]
        found = {
            "kind": facts.kind,
            "simulated": is_simulated,
            "driver": facts.driver,
            "way": facts.way,
            "can_save": facts.can_save,
            "can_map": facts.can_map,
            "why_not": facts.why_not,
        }
        click.echo(json.dumps({**found, "devices": devices}, indent=2))
        return
    _show(facts, free)


def _show(facts: DeviceFacts, free: Mapping[str, int]) -> None:
    if facts.kind == "cpu":
        click.echo("no device: replicas compute on the CPU, and all of them is in host memory")
        return
    way = f", by {facts.way}" if facts.way else ""
    click.echo(f"{facts.kind}: driver {facts.driver}{way}")
    for uuid, size in facts.memory_bytes.items():
        name = (facts.names or {}).get(uuid, "")
        here = f"{format_bytes(free[uuid])} free of {format_bytes(size)}" if uuid in free else ""
        click.echo(f"  {uuid}  {name}  {here}")
    if facts.can_save:
        elsewhere = "also to another device" if facts.can_map else "to the same device only"
        click.echo(f"replicas on it can be saved and put back, {elsewhere}")
    else:
        click.echo(f"replicas on it cannot be saved: {facts.why_not}")


@device.command()
@click.option("--sim", "is_simulated", is_flag=True, help="On the simulated device instead.")
@click.option("--size-mb", type=click.IntRange(1), default=HELD_BYTES >> 20, show_default=True,
              help="Device memory to take out and back.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def selftest(is_simulated: bool, size_mb: int, as_json: bool) -> None:
    """Take a small process off its device and put it back; it must find its memory as it was."""
    chosen = _chosen(is_simulated)
    if chosen.kind == "cpu":
        raise NagaraError(
            "there is no device on this machine",
            where="nagara device selftest",
            hint="--sim tries the orders out on the simulated one",
        )
    tested = self_test(chosen, held_bytes=size_mb << 20)
    if as_json:
        found = {"kind": chosen.kind, "simulated": is_simulated, **asdict(tested)}
        click.echo(json.dumps(found, indent=2))
        return
    simulated = "simulated: " if is_simulated else ""
    click.echo(
        f"{simulated}{format_bytes(tested.held_bytes)} were taken off in "
        f"{tested.saved_in_s:.2f} s and put back in {tested.restored_in_s:.2f} s"
    )
