"""How replicas are run on a machine: the protocol, and what both ways of running share."""

import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from nagara.base.spans import Waterfall
from nagara.contract.replica import FilesReport, ReplicaSpec, WeightsRead
from nagara.node.replica_folder import ReplicaFolder
from nagara.snapshot.catalog import Snapshot


@dataclass(slots=True)
class Running:
    """A replica's first process and the way to its port.

    `host_parts`: of one put back, seconds by part of the host stage; see `StartReport`.
    `is_levelled`: its libraries were told to use less than this CPU has. `avx512_before_s`: what
    its first thread had used before; see `vector_use`. `weights`: what it has
    read of them at its start, or again after a restore.
    """

    pid: int
    port: "Port"
    host_parts: Mapping[str, float] | None = None
    is_levelled: bool = False
    avx512_before_s: float = float("-inf")
    weights: WeightsRead | None = None


def with_weights(report: FilesReport, running: Running | None) -> FilesReport:
    """The report with what the replica says it read of its weights."""
    return report if running is None else replace(report, weights=running.weights)


class Port(Protocol):
    """The port a replica listens on."""

    def open_socket(self) -> tuple[socket.socket, tuple[str, int]]:
        """An unconnected, non-blocking socket, and the address to connect it to."""
        ...

    def close(self) -> None:
        """Gives up what is held for the way."""
        ...


class Runtime(Protocol):
    """One way of running replicas: as containers, or as plain processes."""

    @property
    def isolation(self) -> str:
        """`container` or `process`."""
        ...

    async def open(self) -> None:
        """Makes what all replicas need; undoes what an earlier process has left of it."""
        ...

    async def took_over(self, replicas: Collection[str]) -> None:
        """These replicas of an earlier process go on; what others of it held is given up."""
        ...

    def resume(self) -> None:
        """Looks after what works for the replicas taken over. Blocking, after `took_over`."""
        ...

    async def close(self, *, take_down: bool) -> None:
        """Undoes `open`. Replicas may go on running, unless everything is to be taken down."""
        ...

    def report(
        self, folder: ReplicaFolder, spec: ReplicaSpec
    ) -> tuple[FilesReport, Callable[[], None] | None]:
        """How a replica's files became visible, and what is left to do about it at leisure.

        Both are blocking. Called when the replica is ready.
        """
        ...

    async def launch(
        self, folder: ReplicaFolder, spec: ReplicaSpec, log: Path, waterfall: Waterfall
    ) -> Running:
        """Runs the spec's command. Raises `StartFailedError` when it cannot be run at all."""
        ...

    async def restore(
        self,
        folder: ReplicaFolder,
        spec: ReplicaSpec,
        snapshot: Snapshot,
        log: Path,
        waterfall: Waterfall,
    ) -> Running:
        """Puts a snapshot's processes back. Raises `SnapshotError`, or the machine's fault."""
        ...

    async def adopt(self, folder: ReplicaFolder, port: int, pid: int) -> Running:
        """Takes over a replica that another process of this node has started."""
        ...

    async def clear(self, folder: ReplicaFolder) -> None:
        """Ends what still runs of the replica and undoes mounts, container and cgroups.

        May be repeated. Raises `NodeError` when something cannot be ended or undone.
        """
        ...


def substituted(text: str, values: Mapping[str, str]) -> str:
    """`${NAME}` replaced by its value; other uses of `$` are left alone."""
    for name, value in values.items():
        text = text.replace("${" + name + "}", value)
    return text
