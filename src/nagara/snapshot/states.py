"""The states of one process's hold on a device, and the only ways between them.

    RUNNING ──lock──▶ LOCKING ──done──▶ LOCKED ──checkpoint──▶ CHECKPOINTING ──done──┐
       ▲                 │ refused        │ ▲                      │ broke           ▼
       ├─────────────────┘                │ └─done─ RESTORING ◀─restore─ CHECKPOINTED
       └──────done── UNLOCKING ◀──unlock──┘             │ broke
                         │ broke                        ▼
                         └──────────────────────────▶ FAILED

A process may end at any time (`GONE`). What has failed only ends: nothing leads back, since the
driver promises nothing of such a process. Only a lock can be refused without a trace, which is
why it has a time limit and the others have none that leaves the process usable. An event the
table does not know for a state raises and changes nothing. Pure: no clock, no I/O.
"""

from enum import StrEnum


class DeviceState(StrEnum):
    """How a process and its device stand."""

    RUNNING = "running"  # it may call the device
    LOCKING = "locking"  # waits for submitted work; its next call will block
    LOCKED = "locked"  # its calls block; its memory is on the device
    CHECKPOINTING = "checkpointing"  # memory is on its way to the host
    CHECKPOINTED = "checkpointed"  # memory is on the host; it holds no device
    RESTORING = "restoring"  # memory is on its way back
    UNLOCKING = "unlocking"
    FAILED = "failed"  # beyond repair: to be ended
    GONE = "gone"


class DeviceEvent(StrEnum):
    """What happens to the hold."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"
    DONE = "done"
    REFUSED = "refused"  # in time, and without a trace
    BROKE = "broke"
    ENDED = "ended"


class IllegalDeviceEventError(Exception):
    """An event has no place in a state: a mistake of the caller's."""


_S, _E = DeviceState, DeviceEvent

TRANSITIONS: dict[tuple[DeviceState, DeviceEvent], DeviceState] = {
    (_S.RUNNING, _E.LOCK): _S.LOCKING,
    (_S.LOCKING, _E.DONE): _S.LOCKED,
    (_S.LOCKING, _E.REFUSED): _S.RUNNING,
    (_S.LOCKING, _E.BROKE): _S.FAILED,
    (_S.LOCKED, _E.CHECKPOINT): _S.CHECKPOINTING,
    (_S.LOCKED, _E.UNLOCK): _S.UNLOCKING,
    (_S.CHECKPOINTING, _E.DONE): _S.CHECKPOINTED,
    (_S.CHECKPOINTING, _E.BROKE): _S.FAILED,
    (_S.CHECKPOINTED, _E.RESTORE): _S.RESTORING,
    (_S.RESTORING, _E.DONE): _S.LOCKED,
    (_S.RESTORING, _E.BROKE): _S.FAILED,
    (_S.UNLOCKING, _E.DONE): _S.RUNNING,
    (_S.UNLOCKING, _E.BROKE): _S.FAILED,
} | {(state, _E.ENDED): _S.GONE for state in _S if state is not _S.GONE}

TRANSIENT = frozenset({_S.LOCKING, _S.CHECKPOINTING, _S.RESTORING, _S.UNLOCKING})
HOLDING = frozenset(  # device memory
    {_S.RUNNING, _S.LOCKING, _S.LOCKED, _S.CHECKPOINTING, _S.RESTORING, _S.UNLOCKING}
)


def after(state: DeviceState, event: DeviceEvent) -> DeviceState:
    """The state that follows.

    Raises:
        IllegalDeviceEventError: the event has no place in `state`.
    """
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalDeviceEventError(f"a process that is {state} cannot have: {event}")
    return target


def can(state: DeviceState, event: DeviceEvent) -> bool:
    """Whether the event has a place in the state."""
    return (state, event) in TRANSITIONS
