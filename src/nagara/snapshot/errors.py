"""Errors of the snapshot room, by what the caller does next.

SnapshotError
├── CaptureError      there is no snapshot; the app goes on starting plainly
├── HostMisfitError   the snapshot is good, this host (or its present state) is not the one
├── BadSnapshotError  the snapshot itself is at fault: count it, quarantine it when repeated
└── RestoreError      the attempt failed for another reason (infrastructure)
"""

from nagara.base.errors import NagaraError


class SnapshotError(NagaraError):
    """Root of the room's errors."""


class CaptureError(SnapshotError):
    """No snapshot could be made."""


class HostMisfitError(SnapshotError):
    """The snapshot does not fit this host; it stays good."""


class BadSnapshotError(SnapshotError):
    """The snapshot does not give back a working replica."""


class RestoreError(SnapshotError):
    """The restore failed for a reason outside the snapshot."""
