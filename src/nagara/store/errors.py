"""What can go wrong with objects, by what a caller does about it.

StoreError
├── AbsentError        no tier has it, and every tier said so: asking again is pointless
├── UnavailableError   a tier could not be asked (network, overload, time): try later
├── CorruptError       the bytes are not what the name says, from every tier that has it
├── FullError          no room on the disk: the caller passes the disk by
└── BadNameError       not a well-formed object name, key, chunk list or reference list
"""

from nagara.base.errors import NagaraError


class StoreError(NagaraError):
    """An object cannot be had."""


class AbsentError(StoreError):
    """Every tier answered that it does not have it."""


class UnavailableError(StoreError):
    """At least one tier that may have it could not be asked.

    Args:
        retry_after_s: what the tier asked for, if it did.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.retry_after_s = retry_after_s


class CorruptError(StoreError):
    """The bytes do not have the hash in the name."""


class FullError(StoreError):
    """The disk or the budget is full, and nothing may be evicted."""


class BadNameError(StoreError):
    """Not well-formed; comes from outside or from a bug, never from a good store."""
