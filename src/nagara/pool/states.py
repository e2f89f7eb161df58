"""A machine's states, the only ways between them, and how long it may stay in each.

    REQUESTED ─accepted─▶ BOOTING ─up─▶ CHECKING ─passed─▶ READY ─drain─▶ DRAINING
        │                    │             │                 ▲               │
        │refused             │refused,     │failed, overdue  ├────resume─────┤
        ▼                    ▼overdue      ▼                 │               │
       GONE            RELEASING ◀──────────────────────  DIAGNOSING ◀─diagnose
                         │   ▲                               │failed, overdue│
                  absent ▼   └─────overdue, release───── QUARANTINED ◀──condemn
                       GONE

A machine that its provider no longer has is `GONE` from any state. An event that the table does
not know for a state raises and changes nothing. Pure: no clock, no I/O.
"""

from enum import StrEnum

from nagara.pool.errors import IllegalEventError


class MachineState(StrEnum):
    """Where a machine is in its life."""

    REQUESTED = "requested"  # recorded; its provider may or may not have heard of it
    BOOTING = "booting"  # accepted by the provider
    CHECKING = "checking"  # runs; its boot checks are under way
    READY = "ready"  # its slots may be leased
    DRAINING = "draining"  # no new leases; present ones end
    DIAGNOSING = "diagnosing"  # empty; looked at more thoroughly
    QUARANTINED = "quarantined"  # found bad; kept a while for a person to look at
    RELEASING = "releasing"  # to be given back; the provider's list has to confirm it
    GONE = "gone"


class MachineEvent(StrEnum):
    """What happens to a machine."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UP = "up"
    PASSED = "passed"
    FAILED = "failed"
    DRAIN = "drain"
    RESUME = "resume"
    DIAGNOSE = "diagnose"
    CONDEMN = "condemn"
    RELEASE = "release"
    OVERDUE = "overdue"
    ABSENT = "absent"


_S, _E = MachineState, MachineEvent

TRANSITIONS: dict[tuple[MachineState, MachineEvent], MachineState] = {
    (_S.REQUESTED, _E.ACCEPTED): _S.BOOTING,
    (_S.REQUESTED, _E.REFUSED): _S.GONE,
    (_S.REQUESTED, _E.OVERDUE): _S.RELEASING,
    (_S.REQUESTED, _E.RELEASE): _S.RELEASING,
    (_S.BOOTING, _E.UP): _S.CHECKING,
    (_S.BOOTING, _E.REFUSED): _S.RELEASING,
    (_S.BOOTING, _E.OVERDUE): _S.RELEASING,
    (_S.BOOTING, _E.RELEASE): _S.RELEASING,
    (_S.BOOTING, _E.ABSENT): _S.GONE,
    (_S.CHECKING, _E.PASSED): _S.READY,
    (_S.CHECKING, _E.FAILED): _S.RELEASING,
    (_S.CHECKING, _E.OVERDUE): _S.RELEASING,
    (_S.CHECKING, _E.RELEASE): _S.RELEASING,
    (_S.CHECKING, _E.ABSENT): _S.GONE,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.ABSENT): _S.GONE,
    (_S.DRAINING, _E.RESUME): _S.READY,
    (_S.DRAINING, _E.DIAGNOSE): _S.DIAGNOSING,
    (_S.DRAINING, _E.CONDEMN): _S.QUARANTINED,
    (_S.DRAINING, _E.RELEASE): _S.RELEASING,
    (_S.DRAINING, _E.OVERDUE): _S.RELEASING,
    (_S.DRAINING, _E.ABSENT): _S.GONE,
    (_S.DIAGNOSING, _E.PASSED): _S.READY,
    (_S.DIAGNOSING, _E.FAILED): _S.QUARANTINED,
    (_S.DIAGNOSING, _E.OVERDUE): _S.QUARANTINED,
    (_S.DIAGNOSING, _E.ABSENT): _S.GONE,
    (_S.QUARANTINED, _E.RELEASE): _S.RELEASING,
    (_S.QUARANTINED, _E.OVERDUE): _S.RELEASING,
    (_S.QUARANTINED, _E.ABSENT): _S.GONE,
    # A release that does not come about is asked for again, never forgotten.
    (_S.RELEASING, _E.OVERDUE): _S.RELEASING,
    (_S.RELEASING, _E.ABSENT): _S.GONE,
}

DEADLINES_S: dict[MachineState, float] = {
    _S.REQUESTED: 300.0,
    _S.BOOTING: 1200.0,
    _S.CHECKING: 90.0,
    _S.DRAINING: 3600.0,
    _S.DIAGNOSING: 5400.0,
    _S.QUARANTINED: 3600.0,
    _S.RELEASING: 120.0,
}

RUNNING = frozenset({_S.CHECKING, _S.READY, _S.DRAINING, _S.DIAGNOSING, _S.QUARANTINED})
IN_FLIGHT = frozenset({_S.REQUESTED, _S.BOOTING, _S.CHECKING})
MOVING = frozenset({_S.REQUESTED, _S.BOOTING, _S.RELEASING})  # the provider's list says how far


def after(state: MachineState, event: MachineEvent) -> MachineState:
    """The state that follows.

    Raises:
        IllegalEventError: the event has no place in `state`.
    """
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalEventError(f"a machine that is {state} cannot have: {event}")
    return target
