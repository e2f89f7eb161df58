"""What the pool says of itself in numbers: for `/metrics`, the API, `nagara pool status`. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nagara import __version__
from nagara.contract.machine import CheckKind, HealthReport
from nagara.pool.core import PoolCore
from nagara.pool.machines import Machine
from nagara.pool.problem import Problem
from nagara.pool.states import IN_FLIGHT, MachineState


@dataclass(frozen=True, slots=True)
class Figures:
    """One moment. `target` and `level` are devices free to be claimed; costs are per hour."""

    level: int
    target: float
    leased: int
    machines: int
    ready: int
    coming: int
    claims: int
    misses: int
    utilisation: float  # leased devices of ready machines' devices
    cost_h: float
    idle_cost_h: float  # of devices that are not leased, boots and diagnostics included


def figures_of(core: PoolCore, problem: Problem) -> Figures:
    """The present ones."""
    leased = devices = ready = coming = 0
    cost = idle = 0.0
    for machine in core.table:
        used = sum(held.wanted.devices for held in machine.held.values())
        leased += used
        price = machine.offering.price_h
        cost += price
        idle += price * (1 - used / machine.offering.devices)
        coming += machine.state in IN_FLIGHT
        if machine.state is MachineState.READY:
            ready += 1
            devices += machine.offering.devices
    wanted = sum(demand.quantity for demand in problem.demands) / problem.rules.utilisation
    return Figures(
        level=core.grants.inventory.free_slots,
        target=round(max(0.0, wanted - leased), 2),
        leased=leased,
        machines=len(core.table),
        ready=ready,
        coming=coming,
        claims=core.claims,
        misses=core.misses,
        utilisation=round(leased / devices, 4) if devices else 0.0,
        cost_h=round(cost, 4),
        idle_cost_h=round(idle, 4),
    )


def machine_document(machine: Machine, report: HealthReport | None) -> dict[str, Any]:
    """A machine as JSON: what it is, its state and why, its leases, its last round of checks."""
    offering = machine.offering
    return {
        "name": machine.name,
        "state": machine.state.value,
        "reason": machine.reason,
        "is_kept_out": machine.is_kept_out,
        "kept_out": sorted(machine.kept_out),
        "is_silent": machine.is_silent,
        "offering": offering.id,
        "provider": offering.provider,
        "region": offering.region,
        "type": offering.type,
        "devices": offering.devices,
        "leased": sum(held.wanted.devices for held in machine.held.values()),
        "price_h": offering.price_h,
        "address": machine.address,
        "version": __version__ if machine.is_own else machine.version,
        "leases": [
            {"slot": held.slot, "epoch": held.epoch, "app": held.app}
            for held in machine.held.values()
        ],
        "epoch": machine.epoch,
        "running_check": running.value if (running := _running_check(machine)) else None,
        "checks": None if report is None else asdict(report),
    }


def _running_check(machine: Machine) -> CheckKind | None:
    if machine.state is MachineState.CHECKING:
        return CheckKind.BOOT
    return machine.diagnosis if machine.state is MachineState.DIAGNOSING else None


_KINDS = {"claims": "counter", "misses": "counter"}
_HELP = {
    "level": "Free devices that can be claimed now.",
    "target": "Free devices that the plan wants.",
    "leased": "Devices under a lease.",
    "machines": "Machines the pool knows.",
    "ready": "Machines whose devices can be claimed.",
    "coming": "Machines ordered, booting or being checked.",
    "claims": "Claims, granted or not.",
    "misses": "Claims that found nothing free.",
    "utilisation": "Leased share of ready devices.",
    "cost_h": "List price of all machines per hour.",
    "idle_cost_h": "List price of devices without a lease per hour.",
}


def machine_metrics(machines: Iterable[Machine]) -> str:
    """Prometheus's text format: machines by state, and what is leased and silent of each."""
    counts: Counter[str] = Counter()
    leases, silence = [], []
    for machine in machines:
        counts[machine.state.value] += 1
        label = f'{{machine="{machine.name}",type="{machine.offering.type}"}}'
        leased = sum(held.wanted.devices for held in machine.held.values())
        leases.append(f"nagara_machine_leased{label} {leased}")
        silence.append(f"nagara_machine_silent{label} {int(machine.is_silent)}")
    by_state = [
        f'nagara_pool_machines_by_state{{state="{state.value}"}} {counts[state.value]}'
        for state in MachineState
    ]
    lines = []
    for name, text, values in (
        ("nagara_pool_machines_by_state", "Machines the pool knows, by state.", by_state),
        ("nagara_machine_leased", "Devices of the machine under a lease.", leases),
        ("nagara_machine_silent", "1: its agent did not answer when last asked.", silence),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", *values]
    return "\n".join(lines) + "\n"


def metrics(figures: Figures) -> str:
    """Prometheus's text format."""
    lines = []
    for name, value in asdict(figures).items():
        kind = _KINDS.get(name, "gauge")
        full = f"nagara_pool_{name}{'_total' if kind == 'counter' else ''}"
        lines += [f"# HELP {full} {_HELP[name]}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
