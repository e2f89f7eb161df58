"""One replica of a node while it exists. Belongs to the node's event loop."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from nagara.contract.replica import CaptureOrder, ReplicaStatus, StartOrder
from nagara.node.replica_folder import ReplicaFolder, ReplicaRecord
from nagara.node.runtime import Running


@dataclass(slots=True)
class Replica:
    """What a node knows of a replica, and the tasks that make it and take it down."""

    record: ReplicaRecord
    folder: ReplicaFolder
    running: Running | None = None
    exit_code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False
    making: asyncio.Task[Any] | None = None
    removal: asyncio.Task[None] | None = None
    disk_bytes: int | None = None  # of its own layer, at the last look
    why_ended: str | None = None  # by the node, unasked

    @property
    def name(self) -> str:
        return self.record.replica

    @property
    def is_ending(self) -> bool:
        """Whether it has ended or is being ended."""
        return self.is_stopping or self.exit_code is not None

    def status(self) -> ReplicaStatus:
        record = self.record
        return ReplicaStatus(
            replica=record.replica,
            tenant=record.tenant,
            app=record.app,
            definition=record.definition,
            lease=record.lease,
            ready=record.ready and self.exit_code is None,
            exit_code=self.exit_code,
            detail={} if self.why_ended is None else {"reason": self.why_ended},
        )

    def note_end(self, exit_code: int) -> None:
        """Its first process has ended."""
        self.exit_code = exit_code
        self.ended.set()

    def begin_again(self) -> None:
        """Back to before anything ran, so that another way of starting can be tried."""
        if self.running:
            self.running.port.close()
        self.running, self.exit_code = None, None
        self.ended.clear()


def record_of(order: StartOrder | CaptureOrder) -> ReplicaRecord:
    """What is written down before anything is made for an order."""
    spec = order.spec
    return ReplicaRecord(
        replica=order.replica,
        tenant=spec.tenant,
        app=spec.app,
        definition=spec.definition,
        lease=order.lease,
        port=spec.port,
        is_capture=isinstance(order, CaptureOrder),
        devices=spec.devices,
        disk_limit_bytes=spec.limits.disk_bytes,
    )


def spoken(exit_code: int) -> str:
    """An end in words; negative codes are signals."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
