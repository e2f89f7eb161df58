"""Whether a provider's list is to be believed that lacks a machine. Pure.

A list may be late, cut short or empty though all is well (an expired token, a page that was lost).
So one list is not enough; a machine that answers after it was said to be missing is there; and
when many are missing at once, it is the list that is suspect, for some minutes. Only an end that we
have asked for ourselves needs no such patience.
"""

from collections.abc import Iterable

from nagara.pool.health.brake import is_too_many
from nagara.pool.machines import Machine
from nagara.pool.states import MachineState

ABSENCES = 2  # lists in a row
ABSENT_S, DOUBTED_S = 25.0, 300.0  # between the first of them and the last

_UNSURE = (MachineState.REQUESTED, MachineState.RELEASING)  # need not be listed


def doubt(provider: str, machines: Iterable[Machine], listed: Iterable[str]) -> str | None:
    """Why this list of a provider is not to be believed at once, or None."""
    names = {machine.name for machine in machines if machine.state not in _UNSURE}
    missing = names.difference(listed)
    if not is_too_many(len(missing), len(names)):
        return None
    return (
        f"the list of {provider} lacks {len(missing)} of {len(names)} machines at once: "
        "the list is suspect"
    )


def is_believed(machine: Machine, begun_s: float, *, is_doubted: bool, is_replaced: bool) -> bool:
    """Notes that one more list lacks the machine; True: it is gone.

    Args:
        begun_s: when the list was asked for.
        is_replaced: another machine has its address, so an answer from there says nothing.
    """
    is_asked_for = machine.state is MachineState.RELEASING
    is_alive = machine.heard_s >= machine.absent_since_s and not is_replaced and not is_asked_for
    if machine.absences == 0 or is_alive:
        machine.absences, machine.absent_since_s = 0, begun_s
    machine.absences += 1
    absent_s = begun_s - machine.absent_since_s
    patience_s = 0.0 if is_asked_for else DOUBTED_S if is_doubted else ABSENT_S
    return machine.absences >= ABSENCES and absent_s >= patience_s
