"""One replica as control sees it, and the only ways its state may change.

    STARTING ─ready──▶ READY ─drain──▶ DRAINING ─drained──▶ STOPPING ─stopped──▶ STOPPED
       │ │               │                │                    │
       │ └cancel──────▶ STOPPING          └──────exited─────┐   └─exited──▶ STOPPED
       └─failed──▶ FAILED ◀──exited───────┘◀────────────────┘

An event that the table does not know for a state raises and changes nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from nagara.contract.replica import Lease
from nagara.control.app import App


class ReplicaState(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"  # ordered from the node, not yet ready
    READY = "ready"  # routed: requests reach it
    DRAINING = "draining"  # not routed; requests in flight end
    STOPPING = "stopping"  # being ended by the node
    STOPPED = "stopped"  # ended on our order
    FAILED = "failed"  # never became ready, or ended by itself


class ReplicaEvent(StrEnum):
    """What happens to a replica."""

    READY = "ready"
    FAILED = "failed"
    CANCEL = "cancel"
    DRAIN = "drain"
    DRAINED = "drained"
    STOPPED = "stopped"
    EXITED = "exited"


_S, _E = ReplicaState, ReplicaEvent

TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (_S.STARTING, _E.READY): _S.READY,
    (_S.STARTING, _E.FAILED): _S.FAILED,
    (_S.STARTING, _E.CANCEL): _S.STOPPING,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.EXITED): _S.FAILED,
    (_S.DRAINING, _E.DRAINED): _S.STOPPING,
    (_S.DRAINING, _E.EXITED): _S.FAILED,
    (_S.STOPPING, _E.STOPPED): _S.STOPPED,
    (_S.STOPPING, _E.EXITED): _S.STOPPED,
}

LIVE = frozenset({_S.STARTING, _S.READY, _S.DRAINING, _S.STOPPING})


class IllegalEventError(RuntimeError):
    """A bug of ours: this cannot happen to a replica in this state."""


@dataclass(slots=True, eq=False)
class Replica:
    """A replica with its lease. Changed by the fleet's tasks only, through `on`.

    `lease` is None while its start waits for a slot.
    """

    name: str
    app: App
    lease: Lease | None = None
    state: ReplicaState = ReplicaState.STARTING
    ready_s: float | None = None  # monotonic; when it was routed

    def on(self, event: ReplicaEvent) -> ReplicaState:
        """Applies `event` and returns the new state.

        Raises:
            IllegalEventError: the event has no place in the present state.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEventError(f"{self.name} is {self.state}: {event} cannot happen to it")
        self.state = target
        return target
