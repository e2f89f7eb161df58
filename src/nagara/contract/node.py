"""The protocol between control and one machine.

In-process, over a Unix socket or from another machine: control cannot tell which.
"""

import socket
from collections.abc import AsyncIterator
from typing import Protocol

from nagara.base.errors import NagaraError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartOrder,
    StartReport,
)


class NodeError(NagaraError):
    """The machine could not do what was asked; the replica concerned does not exist any more."""


class StartFailedError(NodeError):
    """The app did not become ready: its own exit, time-out or answer is in the message."""


class ReplicaGoneError(NodeError):
    """The replica named is not (or no longer) on this machine."""


class BadImageError(NodeError):
    """An image that was ordered cannot be had: its source is wrong, absent or damaged."""

    exit_code = 2


class NodeUnavailableError(NodeError):
    """The machine's agent cannot be reached; what its replicas do is unknown."""


class DeposedError(NodeError):
    """A newer control process gives the orders there: nothing was done, and nothing will be."""


class Node(Protocol):
    """What one machine can do with replicas.

    All methods may raise `NodeUnavailableError`, and `DeposedError` when the caller is no longer
    the control process that gives the orders.
    """

    async def facts(self) -> NodeFacts:
        """What the machine is."""
        ...

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        """Tells the machine where its zone's objects are: addresses, nearest first, in place of
        those it was told before. Its own among them it passes over.

        What was made there and the zone lacks is brought to the first cache, in the background.
        """
        ...

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        """Brings an app's image here, so that its replicas can be started; again is quick.

        Raises:
            BadImageError: naming the source and what is wrong with it.
        """
        ...

    async def start(self, order: StartOrder) -> StartReport:
        """Starts a replica and returns when it is ready to serve.

        Restores it from a fitting snapshot if there is one; on any failure of that, starts it
        plainly and says so in the report. Cancelling the call ends the replica.

        Raises:
            StartFailedError: the app did not become ready within its time-out.
        """
        ...

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        """Runs a capture replica, publishes its snapshot and ends it.

        Raises:
            StartFailedError: the capture replica did not become ready.
        """
        ...

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        """Ends a replica: SIGTERM, after `grace_s` SIGKILL. Unknown replicas are no error."""
        ...

    async def dial(self, replica: str) -> socket.socket:
        """A connected, non-blocking stream socket to the replica's port. The caller closes it.

        Raises:
            ReplicaGoneError: no such replica here.
            ConnectionError: nobody listens on its port.
        """
        ...

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        """All replicas of this machine, including those that have ended and are not yet removed."""
        ...

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        """What its ready replicas use; those of which nothing is known are left out."""
        ...

    async def disk(self) -> DiskReport:
        """What it keeps on its disk, and what it has removed to keep to its budget."""
        ...

    def exits(self) -> AsyncIterator[ReplicaStatus]:
        """Yields each replica that ends by itself, as it happens."""
        ...

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        """The end of what the replica wrote to its standard output and error.

        Raises:
            ReplicaGoneError: no log of such a replica is kept.
        """
        ...

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """All snapshots of this machine, also those that nothing can be restored from."""
        ...

    async def forget_app(self, tenant: str, app: str) -> None:
        """Removes the app's snapshots and logs from this machine."""
        ...
