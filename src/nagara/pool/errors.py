"""The pool room's errors.

RuntimeError
└── IllegalEventError   a bug of ours: the machine's state has no place for the event
NagaraError
├── PoolError           the pool could not do what was asked
│   ├── StaleEpochError     someone else changed the machine first: look again
│   └── UnknownMachineError no machine of that name
├── PlanError           no usable plan came out: take the last one, or the greedy one
└── UsageError
    └── PoolFileError   the pool's file names something that cannot be
"""

from nagara.base.errors import NagaraError, UsageError


class IllegalEventError(RuntimeError):
    """This cannot happen to a machine in this state; nothing was changed."""


class PoolError(NagaraError):
    """The pool could not do what was asked."""


class StaleEpochError(PoolError):
    """The machine was changed since its epoch was read; nothing was changed now."""


class UnknownMachineError(PoolError):
    """No machine of that name is in the table."""


class PlanError(NagaraError):
    """The planner gave no plan that keeps its own constraints."""


class PoolFileError(UsageError):
    """The pool's file cannot be used."""
