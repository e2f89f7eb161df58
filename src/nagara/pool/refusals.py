"""Why a claim finds nothing, and when it will. Pure."""

from nagara.pool.demandclass import DemandClass
from nagara.pool.leadtime import LeadTimes
from nagara.pool.machines import MachineTable
from nagara.pool.states import IN_FLIGHT


def why_none(table: MachineTable, wanted: DemandClass) -> str:
    """In words."""
    states: dict[str, int] = {}
    for state, machines in table.accepted_by(wanted):
        if machines:
            states[state] = states.get(state, 0) + len(machines)
    if not states:
        return "no machine of an allowed type and region is in the pool"
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"no free slot on the allowed machines ({said})"


def earliest_s(
    table: MachineTable, leads: LeadTimes, wanted: DemandClass, now_s: float
) -> float | None:
    """How long until the next machine is expected that would do; None: none is on its way."""
    coming = [
        max(0.0, machine.requested_s + leads.typical_s(machine.offering.id) - now_s)
        for state, machines in table.accepted_by(wanted)
        if state in IN_FLIGHT
        for machine in machines.values()
    ]
    return min(coming, default=None)
