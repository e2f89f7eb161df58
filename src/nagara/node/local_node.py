"""One machine's replicas: the `Node` protocol carried out here.

Belongs to one event loop. Every replica has a folder that is written before anything is made
for it and removed after everything of it is gone; the keeper knows which processes are alive.
A node that starts anew reads both: it takes ready replicas over and clears the rest away.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from nagara.base.spans import Waterfall
from nagara.contract.node import NodeError, ReplicaGoneError, StartFailedError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    NodeFacts,
    ReplicaSpec,
    ReplicaStatus,
    StartKind,
    StartOrder,
    StartReport,
)
from nagara.node.asking import connected, until_ready
from nagara.node.logs import ReplicaLogs
from nagara.node.replica_folder import ReplicaFolder, ReplicaRecord, replica_folders
from nagara.node.runtime import Running, Runtime
from nagara.node.snapshots import NodeSnapshots, NoSnapshot
from nagara.sandbox.keeper_client import KeeperClient, KeeperError
from nagara.sandbox.signals import handles_signal
from nagara.snapshot.capture import Saved
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.errors import CaptureError, SnapshotError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    """A replica of this node while it exists."""

    record: ReplicaRecord
    folder: ReplicaFolder
    running: Running | None = None
    exit_code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False
    is_paused: bool = False

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
        )


class LocalNode:
    """The replicas of this machine.

    Args:
        root: folder of the replicas' folders.
        snapshots: None where replicas cannot be saved.
        missing: what this machine lacks, in words.
    """

    def __init__(
        self,
        *,
        root: Path,
        runtime: Runtime,
        keeper: KeeperClient,
        logs: ReplicaLogs,
        snapshots: NodeSnapshots | None,
        missing: tuple[str, ...] = (),
    ) -> None:
        self._root = root
        self._runtime = runtime
        self._keeper = keeper
        self._logs = logs
        self._snapshots = snapshots
        self._missing = missing
        self._replicas: dict[str, _Replica] = {}
        self._listeners: set[asyncio.Queue[ReplicaStatus]] = set()
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts the keeper where it is missing and takes over what an earlier node has left."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._keeper.ensure()
        self._watcher = asyncio.create_task(self._watch(), name="replica exits")
        kept = {child.name: child for child in await self._keeper.children()}
        for folder in list(replica_folders(self._root)):
            record, child = folder.read(), kept.pop(folder.name, None)
            is_alive = child is not None and child.exit_code is None and child.pid is not None
            if record and record.ready and not record.is_capture and child and is_alive:
                running = await self._runtime.adopt(folder, record.port, child.pid or 0)
                self._replicas[folder.name] = _Replica(record, folder, running)
                _log.info("took over replica %s", folder.name)
            else:
                await self._runtime.clear(folder, paused=bool(record and record.is_capture))
                folder.remove()
        for name in kept:  # a process whose folder is gone: nobody answers for it
            await self._runtime.clear(ReplicaFolder(self._root / name))

    async def close(self, *, stop_replicas: bool) -> None:
        """Ends the node; with `stop_replicas` also its replicas and the keeper."""
        if stop_replicas:
            async with asyncio.TaskGroup() as group:
                for name in list(self._replicas):
                    group.create_task(self.stop(name))
        if self._watcher:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if stop_replicas:
            with contextlib.suppress(KeeperError):
                await self._keeper.shutdown()

    async def facts(self) -> NodeFacts:
        return NodeFacts(
            machine=socket.gethostname(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            isolation=self._runtime.isolation,
            can_snapshot=self._snapshots is not None,
            missing=self._missing,
        )

    async def start(self, order: StartOrder) -> StartReport:
        began_s = time.monotonic()
        spec = order.spec
        waterfall = Waterfall(time.monotonic, order.replica)
        record = _record(order)
        snapshot: Snapshot | NoSnapshot = NoSnapshot("snapshots are off", capture_wanted=False)
        if self._snapshots and spec.snapshot:
            with waterfall.stage("files", "find snapshot"):
                snapshot = await self._snapshots.find(spec)
        fallback: str | None = None
        async with self._making(record) as replica:
            kind = StartKind.PLAIN
            if isinstance(snapshot, Snapshot):
                fallback = await self._try_restore(replica, spec, snapshot, waterfall)
                kind = StartKind.PLAIN if fallback else StartKind.RESTORED
            elif self._snapshots and spec.snapshot:
                fallback = snapshot.reason
            if kind is StartKind.PLAIN:
                await self._run(replica, spec, waterfall)
            await asyncio.to_thread(replica.folder.mark_ready)
            replica.record = dataclasses.replace(record, ready=True)
        return StartReport(
            replica=order.replica,
            kind=kind,
            stages=waterfall.stages(),
            elapsed_s=time.monotonic() - began_s,
            snapshot=snapshot.name if isinstance(snapshot, Snapshot) and not fallback else None,
            fallback=fallback,
            capture_wanted=isinstance(snapshot, NoSnapshot) and snapshot.capture_wanted,
        )

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        if self._snapshots is None:
            return CaptureReport(None, "this machine cannot save replicas")
        began_s = time.monotonic()
        spec = order.spec
        record = dataclasses.replace(_record(order), is_capture=True)
        staging = await asyncio.to_thread(self._snapshots.staging)
        try:
            async with self._making(record) as replica:
                await self._run(replica, spec, Waterfall(time.monotonic, order.replica))
                running = _running(replica)
                answer = await self._snapshots.prepare(running, spec)
                replica.is_paused = True
                saved = await self._save(replica, running, spec, staging)
                await self._remove(replica)
            report = await asyncio.to_thread(self._snapshots.publish, staging, spec, saved, answer)
        except CaptureError as error:
            return CaptureReport(None, str(error), elapsed_s=time.monotonic() - began_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        return dataclasses.replace(report, elapsed_s=time.monotonic() - began_s)

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        found = self._replicas.get(replica)
        if found is None:
            return
        found.is_stopping = True
        if found.running and handles_signal(found.running.pid, signal.SIGTERM):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._keeper.signal(replica, signal.SIGTERM)
                    await found.ended.wait()
        await self._remove(found)

    async def dial(self, replica: str) -> socket.socket:
        found = self._replicas.get(replica)
        if found is None or found.running is None or found.exit_code is not None:
            raise ReplicaGoneError("is not running on this machine", where=replica)
        return await connected(found.running.port)

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        return tuple(replica.status() for replica in self._replicas.values())

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        queue: asyncio.Queue[ReplicaStatus] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        return await asyncio.to_thread(self._logs.tail, replica, tail_bytes)

    async def forget_app(self, tenant: str, app: str) -> None:
        if self._snapshots:
            await asyncio.to_thread(self._snapshots.forget_app, tenant, app)
        await asyncio.to_thread(self._logs.forget_app, tenant, app)

    @contextlib.asynccontextmanager
    async def _making(self, record: ReplicaRecord) -> AsyncIterator[_Replica]:
        """A new replica; if the block fails or is cancelled, nothing of it is left."""
        if record.replica in self._replicas:
            raise NodeError("a replica of that name exists", where=record.replica)
        replica = _Replica(record, ReplicaFolder(self._root / record.replica))
        self._replicas[record.replica] = replica
        try:
            await asyncio.to_thread(replica.folder.create, record)
            yield replica
        except BaseException:
            await asyncio.shield(self._remove(replica))
            raise

    async def _try_restore(
        self, replica: _Replica, spec: ReplicaSpec, snapshot: Snapshot, waterfall: Waterfall
    ) -> str | None:
        """Restores the replica; on failure clears it away and returns why it failed."""
        assert self._snapshots is not None
        try:
            with waterfall.stage("files", "verify"):
                await self._snapshots.verify(snapshot)
            log = self._logs.path_for(replica.record)
            replica.running = await self._runtime.restore(
                replica.folder, spec, snapshot, log, waterfall
            )
            with waterfall.stage("canary"):
                await self._snapshots.check_answer(replica.running, spec, snapshot)
        except SnapshotError as error:
            _log.warning("%s: not restored, starting plainly: %s", replica.record.app, error)
            with waterfall.stage("host", "clear a failed restore"):
                await self._snapshots.count_failure(snapshot, error)
                await self._clear_for_another_try(replica)
            return str(error)
        return None

    async def _clear_for_another_try(self, replica: _Replica) -> None:
        await self._runtime.clear(replica.folder)
        await asyncio.to_thread(replica.folder.empty)
        if replica.running:
            replica.running.port.close()
        replica.running, replica.exit_code = None, None
        replica.ended.clear()

    async def _run(self, replica: _Replica, spec: ReplicaSpec, waterfall: Waterfall) -> None:
        """Runs the app's command and waits until it is ready.

        Raises:
            StartFailedError: it ended, or was not ready in time; with the end of its log.
        """
        log = self._logs.path_for(replica.record)
        replica.running = await self._runtime.launch(replica.folder, spec, log, waterfall)
        with waterfall.stage("host", "until ready"):
            ready = asyncio.ensure_future(until_ready(replica.running.port, spec.ready_path))
            ended = asyncio.ensure_future(replica.ended.wait())
            try:
                await asyncio.wait(
                    (ready, ended),
                    timeout=spec.start_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if ready.done():
                    await ready
                    return
            finally:
                ready.cancel()
                ended.cancel()
        if replica.exit_code is not None:
            what = f"its command ended with {_spoken(replica.exit_code)} before it was ready"
        else:
            what = f"{spec.ready_path} was not answered with a 2xx in {spec.start_timeout_s:.0f} s"
        tail = await asyncio.to_thread(self._logs.last_lines, replica.record.replica)
        raise StartFailedError(what + (f"; it wrote:\n{tail}" if tail else ""), where=spec.app)

    async def _save(
        self, replica: _Replica, running: Running, spec: ReplicaSpec, staging: Path
    ) -> Saved:
        """Saves in a worker thread. Cancelled, it ends the replica and thereby the saving."""
        assert self._snapshots is not None
        saving = asyncio.ensure_future(
            asyncio.to_thread(self._snapshots.save, replica.folder, running, spec, staging)
        )
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            await asyncio.shield(self._runtime.clear(replica.folder, paused=True))
            with contextlib.suppress(CaptureError):
                await saving
            raise

    async def _remove(self, replica: _Replica) -> None:
        replica.is_stopping = True
        await self._runtime.clear(replica.folder, paused=replica.is_paused)
        if replica.running:
            replica.running.port.close()
        await asyncio.to_thread(replica.folder.remove)
        self._replicas.pop(replica.record.replica, None)

    async def _watch(self) -> None:
        try:
            async for child in self._keeper.exits():
                replica = self._replicas.get(child.name)
                if replica is None:
                    continue
                replica.exit_code = child.exit_code
                replica.ended.set()
                if replica.record.ready and not replica.is_stopping:
                    for listener in self._listeners:
                        listener.put_nowait(replica.status())
        except KeeperError:
            _log.exception("the keeper is gone; replicas can no longer be watched")


def _record(order: StartOrder | CaptureOrder) -> ReplicaRecord:
    spec = order.spec
    return ReplicaRecord(
        replica=order.replica,
        tenant=spec.tenant,
        app=spec.app,
        definition=spec.definition,
        lease=order.lease,
        port=spec.port,
    )


def _running(replica: _Replica) -> Running:
    if replica.running is None:
        raise CaptureError("ended before it could be saved", where=replica.record.app)
    return replica.running


def _spoken(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
