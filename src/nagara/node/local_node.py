"""One machine's replicas: the `Node` protocol carried out here.

Belongs to one event loop. Every replica has a folder that is written before anything is made
for it and removed after everything of it is gone; the keeper knows which processes are alive.
A node that starts anew reads both: it takes ready replicas over and clears the rest away.
"""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from nagara.base.errors import NagaraError
from nagara.base.spans import Waterfall
from nagara.contract.node import NodeError, ReplicaGoneError, StartFailedError
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    FilesReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartKind,
    StartOrder,
    StartReport,
)
from nagara.node.admission import check_image_order, check_name, check_order
from nagara.node.asking import connected
from nagara.node.disk_budget import DiskBudget
from nagara.node.folder_claim import FolderClaim
from nagara.node.host_parts import with_rest
from nagara.node.logs import ReplicaLogs
from nagara.node.machine_faults import as_node_error
from nagara.node.node_facts import node_facts
from nagara.node.owned_tasks import Leisure, finished, in_thread
from nagara.node.readiness import until_ready
from nagara.node.replica import Replica, record_of
from nagara.node.replica_folder import ReplicaFolder, replica_folders
from nagara.node.replica_images import NodeImages
from nagara.node.replica_lease import put_under_lease
from nagara.node.replica_usage import end_what_outgrows, usage_of
from nagara.node.runtime import Running, Runtime, with_weights
from nagara.node.snapshots import NodeSnapshots, NoSnapshot
from nagara.node.zone import NodeZone
from nagara.sandbox.fault_points import reach
from nagara.sandbox.keeper_client import KeeperClient, KeeperError, KeptChild
from nagara.sandbox.signals import handles_signal
from nagara.snapshot.capture import Saved
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.errors import CaptureError, RestoreError, SnapshotError

_KEEPER_PAUSE_S = 0.5

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


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
        images: NodeImages,
        zone: NodeZone,
        missing: tuple[str, ...] = (),
    ) -> None:
        self._root = root
        self._runtime = runtime
        self._keeper = keeper
        self._logs = logs
        self._snapshots = snapshots
        self._missing = missing
        self._images = images
        catalog = None if snapshots is None else snapshots.catalog
        self.budget = DiskBudget(root.parent.parent, images, logs, catalog)
        self._zone = zone
        self._replicas: dict[str, Replica] = {}
        self._listeners: set[asyncio.Queue[ReplicaStatus]] = set()
        self._leisure = Leisure()
        self._watchers: list[asyncio.Task[None]] = []
        self._claim = FolderClaim(root)

    async def open(self) -> None:
        """Starts the keeper where it is missing and takes over what an earlier node has left.

        Raises:
            NodeError: another node has this folder open, or the folder cannot be used.
        """
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._root.mkdir(exist_ok=True, mode=0o700)
            self._claim.take()
            await self._keeper.ensure()
            await self._runtime.open()
            if self._snapshots:
                await in_thread(self._snapshots.clear_staging)
            await self._take_over()
        except (OSError, NagaraError) as error:
            self._claim.give_up()
            raise as_node_error(error) from error
        limits = end_what_outgrows(self._replicas, self._keeper)
        self._watchers = [
            asyncio.create_task(self._watch(), name="replica exits"),
            asyncio.create_task(limits, name="replica disks"),
            asyncio.create_task(self.budget.keep(lambda: self._replicas), name="disk budget"),
        ]

    async def _take_over(self) -> None:
        kept = {child.name: child for child in await self._keeper.children()}
        for folder in list(replica_folders(self._root)):
            record, child = folder.read(), kept.pop(folder.name, None)
            pid = child.pid if child and child.exit_code is None else None
            if record and record.ready and not record.is_capture and pid:
                with contextlib.suppress(OSError):  # it has just ended
                    running = await self._runtime.adopt(folder, record.port, pid)
                    self._replicas[folder.name] = Replica(record, folder, running)
                    _log.info("took over replica %s", folder.name)
                    continue
            await self._clear_away(folder)
        for name in kept:  # a process whose folder is gone: nobody answers for it
            await self._clear_away(ReplicaFolder(self._root / name))
        await self._runtime.took_over(frozenset(self._replicas))
        self._leisure.begin(self._runtime.resume)  # calls are answered meanwhile

    async def _clear_away(self, folder: ReplicaFolder) -> None:
        """Removes an earlier node's replica; one that resists does not keep others from work."""
        try:
            await self._runtime.clear(folder)
            await in_thread(folder.remove)
        except (NagaraError, OSError):
            _log.exception("replica %s of an earlier node cannot be cleared away", folder.name)

    async def close(self, *, stop_replicas: bool) -> None:
        """Ends the node; with `stop_replicas` also its replicas. The keeper ends with the last."""
        going = [r for r in self._replicas.values() if stop_replicas or r.making]
        await asyncio.gather(*(self.stop(replica.name) for replica in going))
        await self._leisure.ended()
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        for replica in self._replicas.values():
            if replica.running:
                replica.running.port.close()
        await self._runtime.close(take_down=not self._replicas)
        with contextlib.suppress(KeeperError):  # replicas run, or images are mounted
            await self._keeper.shutdown()
        if self._snapshots:
            self._snapshots.close()
        self._claim.give_up()

    async def facts(self) -> NodeFacts:
        return node_facts(self._runtime, self._snapshots, self._missing, self._images, self._zone)

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        await in_thread(self._zone.use, caches)
        self._leisure.begin(self._zone.publish)
        return await self.facts()

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        check_image_order(order)
        try:
            return await in_thread(self._images.bring, order)
        except OSError as error:
            raise as_node_error(error) from error

    async def start(self, order: StartOrder) -> StartReport:
        waterfall = Waterfall(time.monotonic, order.replica)
        replica = self._new(order)
        return await self._made(replica, self._start(replica, order.spec, waterfall))

    async def _start(
        self, replica: Replica, spec: ReplicaSpec, waterfall: Waterfall
    ) -> StartReport:
        with waterfall.stage("files", "folder"):
            await put_under_lease(self._keeper, replica, self.stop)
            await in_thread(replica.folder.create, replica.record)
            reach("start.folder")
            await in_thread(self._logs.prepare, replica.record, frozenset(self._replicas))
        found: Snapshot | NoSnapshot | None = None
        if self._snapshots and spec.snapshot:
            with waterfall.stage("files", "find snapshot"):
                found = await self._snapshots.find(spec)
        fallback = found.reason if isinstance(found, NoSnapshot) else None
        if isinstance(found, Snapshot):
            fallback = await self._try_restore(replica, spec, found, waterfall)
        is_restored = isinstance(found, Snapshot) and not fallback
        if not is_restored:
            await self._run(replica, spec, waterfall)
        with waterfall.stage("files", "ready"):
            replica.record = dataclasses.replace(replica.record, ready=True)
            replica.folder.write(replica.record)
            reach("start.recorded")
            files = await self._files_report(replica, spec)
        return StartReport(
            replica=replica.name,
            kind=StartKind.RESTORED if is_restored else StartKind.PLAIN,
            stages=(stages := waterfall.stages()),
            elapsed_s=waterfall.elapsed_s(),
            snapshot=found.name if isinstance(found, Snapshot) and is_restored else None,
            fallback=fallback,
            failed_snapshot=found.name if isinstance(found, Snapshot) and fallback else None,
            capture_wanted=isinstance(found, NoSnapshot) and found.capture_wanted,
            files=files,
            host=with_rest(replica.running, stages["host"]),
        )

    async def _files_report(self, replica: Replica, spec: ReplicaSpec) -> FilesReport:
        report, rest = await in_thread(self._runtime.report, replica.folder, spec)
        if rest is not None:
            self._leisure.begin(rest)
        return with_weights(report, replica.running)

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        if self._snapshots is None:
            lack = "; ".join(self._missing)
            return CaptureReport(None, f"this machine cannot save replicas: {lack}")
        began_s = time.monotonic()
        replica = self._new(order)
        report = await self._made(replica, self._capture(replica, order.spec, self._snapshots))
        return dataclasses.replace(report, elapsed_s=time.monotonic() - began_s)

    async def _capture(
        self, replica: Replica, spec: ReplicaSpec, snapshots: NodeSnapshots
    ) -> CaptureReport:
        staging = snapshots.staging()
        try:
            await in_thread(snapshots.make_staging, staging)
            reach("capture.staging")
            await put_under_lease(self._keeper, replica, self.stop)
            await in_thread(replica.folder.create, replica.record)
            reach("capture.folder")
            await in_thread(self._logs.prepare, replica.record, frozenset(self._replicas))
            await self._run(replica, spec, Waterfall(time.monotonic, replica.name))
            running = replica.running
            if running is None:
                raise CaptureError("ended before it could be saved", where=spec.app)
            answer = await snapshots.prepare(replica.folder, running, spec)
            reach("capture.prepared")
            saved = await self._save(replica, running, spec, staging)
            await self._remove(replica)
            reach("capture.removed")
            return await snapshots.publish(staging, spec, saved, answer)
        except SnapshotError as error:
            await self._remove(replica)
            return CaptureReport(None, str(error))
        finally:
            await in_thread(shutil.rmtree, staging, ignore_errors=True)

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        found = self._replicas.get(replica)
        if found is None:
            return
        found.is_stopping = True
        if found.making is not None:
            found.making.cancel()
            await asyncio.wait([found.making])
        elif found.running and found.exit_code is None and grace_s > 0:
            await self._ask_to_end(found, found.running, grace_s)
        try:
            await self._remove(found)
        except (NagaraError, OSError) as error:
            raise as_node_error(error) from error

    async def _ask_to_end(self, replica: Replica, running: Running, grace_s: float) -> None:
        if handles_signal(running.pid, signal.SIGTERM):
            with contextlib.suppress(OSError):  # a full disk does not keep it alive
                # A next node is not to take over what is on its way out.
                replica.folder.write(dataclasses.replace(replica.record, ready=False))
            with contextlib.suppress(KeeperError, OSError):  # of time, too: it is killed then
                async with asyncio.timeout(grace_s):
                    await self._keeper.signal(replica.name, signal.SIGTERM)
                    reach("stop.asked")
                    await replica.ended.wait()

    async def dial(self, replica: str) -> socket.socket:
        found = self._replicas.get(replica)
        if found is None or found.running is None or found.exit_code is not None:
            raise ReplicaGoneError("is not running on this machine", where=replica)
        return await connected(found.running.port)

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        return tuple(replica.status() for replica in self._replicas.values())

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        return await in_thread(usage_of, list(self._replicas.values()))

    async def disk(self) -> DiskReport:
        return await in_thread(self.budget.report)

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        queue: asyncio.Queue[ReplicaStatus] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        check_name("replica", replica)
        if replica in self._replicas:
            with contextlib.suppress(KeeperError):
                await self._keeper.drain(replica)
        return await asyncio.to_thread(self._logs.tail, replica, tail_bytes)

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        return await in_thread(self._snapshots.statuses) if self._snapshots else ()

    async def forget_app(self, tenant: str, app: str) -> None:
        check_name("tenant", tenant)
        check_name("app", app)
        if self._snapshots:
            await self._snapshots.forget_app(tenant, app)
        await in_thread(self._images.forget_app, tenant, app)
        await in_thread(self._logs.forget_app, tenant, app)

    def _new(self, order: StartOrder | CaptureOrder) -> Replica:
        check_order(order)
        if order.replica in self._replicas:
            raise NodeError("a replica of that name exists", where=order.replica)
        replica = Replica(record_of(order), ReplicaFolder(self._root / order.replica))
        self._replicas[order.replica] = replica
        return replica

    async def _made(self, replica: Replica, making: Coroutine[Any, Any, Result]) -> Result:
        """The outcome of making a replica. If that fails, or the caller or `stop` ends it,
        nothing of the replica is left."""
        task = asyncio.create_task(making, name=f"making {replica.name}")
        replica.making = task
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise StartFailedError("was stopped before it was ready", where=replica.name)
            return task.result()
        except BaseException as error:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await finished(asyncio.create_task(self._unmade(replica, task)))
            if isinstance(error, Exception):
                raise as_node_error(error) from error
            raise
        finally:
            replica.making = None

    async def _unmade(self, replica: Replica, task: asyncio.Task[Any]) -> None:
        await asyncio.wait([task])
        try:
            await self._remove(replica)
        except (NagaraError, OSError):  # the failure before is what the caller must hear of
            _log.exception("replica %s cannot be cleared away", replica.name)

    async def _try_restore(
        self, replica: Replica, spec: ReplicaSpec, snapshot: Snapshot, waterfall: Waterfall
    ) -> str | None:
        """Restores the replica; on failure clears it away and returns why it failed."""
        assert self._snapshots is not None
        try:
            with waterfall.stage("files", "verify"):
                await self._snapshots.verify(snapshot, replica.name)
            reach("restore.verified")
            log = self._logs.path_for(replica.record)
            replica.running = await self._runtime.restore(
                replica.folder, spec, snapshot, log, waterfall
            )
            with waterfall.stage("canary"):
                await self._snapshots.check_answer(replica.running, spec, snapshot)
                await self._snapshots.count_success(
                    snapshot, replica.folder, replica.running, self._leisure
                )
                reach("restore.answered")
        except (NagaraError, OSError) as error:
            failure = error if isinstance(error, SnapshotError) else RestoreError(str(error))
            _log.warning("%s: not restored, starting plainly: %s", replica.record.app, failure)
            with waterfall.stage("host", "clear a failed restore"):
                await self._snapshots.count_failure(snapshot, failure)
                reach("fallback.counted")
                await self._runtime.clear(replica.folder)
                reach("fallback.cleared")
                await in_thread(replica.folder.empty)
                reach("fallback.emptied")
                replica.begin_again()
            return str(failure)
        return None

    async def _run(self, replica: Replica, spec: ReplicaSpec, waterfall: Waterfall) -> None:
        """Runs the app's command and waits until it is ready.

        Raises:
            StartFailedError: it ended, or was not ready in time; with the end of its log.
        """
        log = self._logs.path_for(replica.record)
        try:
            replica.running = await self._runtime.launch(replica.folder, spec, log, waterfall)
            with waterfall.stage("host", "until ready"):
                what = await until_ready(replica, replica.running, spec)
                reach("launch.ready")
        except StartFailedError as error:
            what = error.what
        if what is not None:
            tail = await asyncio.to_thread(self._logs.last_lines, replica.name)
            raise StartFailedError(what + (f"; it wrote:\n{tail}" if tail else ""), where=spec.app)

    async def _save(
        self, replica: Replica, running: Running, spec: ReplicaSpec, staging: Path
    ) -> Saved:
        """Saves in a worker thread. Cancelled, it ends the replica and thereby the saving."""
        assert self._snapshots is not None
        saving = asyncio.create_task(
            asyncio.to_thread(self._snapshots.save, replica.folder, running, spec, staging)
        )
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            await self._remove(replica)
            with contextlib.suppress(CaptureError):
                await finished(saving)
            raise

    async def _remove(self, replica: Replica) -> None:
        """Takes a replica down, once however many ask for it; goes on if they are cancelled."""
        if replica.removal is None:
            replica.removal = asyncio.create_task(self._take_down(replica))
        removal = replica.removal
        try:
            await finished(removal)
        finally:
            if removal.exception() is not None:
                replica.removal = None  # may be tried again

    async def _take_down(self, replica: Replica) -> None:
        replica.is_stopping = True
        await self._runtime.clear(replica.folder)
        if replica.running:
            replica.running.port.close()
        await in_thread(replica.folder.remove)
        with contextlib.suppress(KeeperError):
            await self._keeper.end_lease(replica.name)
        reach("stop.gone")
        self._replicas.pop(replica.name, None)

    async def _watch(self) -> None:
        """Notes which replicas end; when the keeper itself ends, makes a new one."""
        while True:
            try:
                async for child in self._keeper.exits():
                    self._note_end(child)
            except KeeperError as error:
                _log.error("the keeper has ended, and with it its replicas: %s", error)
            try:
                await self._begin_with_a_new_keeper()
            except (NagaraError, OSError):
                _log.exception("no new keeper yet")
                await asyncio.sleep(_KEEPER_PAUSE_S)

    async def _begin_with_a_new_keeper(self) -> None:
        """Replicas of the old one have nobody who reads what they write: they count as killed."""
        await self._keeper.ensure()
        kept = {child.name for child in await self._keeper.children()}
        for replica in list(self._replicas.values()):
            if replica.running and replica.exit_code is None and replica.name not in kept:
                self._note_end(KeptChild(replica.name, replica.running.pid, -signal.SIGKILL))
                if replica.making is None and replica.removal is None:
                    await self._runtime.clear(replica.folder)

    def _note_end(self, child: KeptChild) -> None:
        replica = self._replicas.get(child.name)
        if replica is None or replica.exit_code is not None or child.exit_code is None:
            return
        if replica.running and replica.running.pid != child.pid:
            return  # an earlier attempt's process
        replica.note_end(child.exit_code)
        if replica.record.ready and not replica.is_stopping:
            for listener in self._listeners:
                listener.put_nowait(replica.status())
