"""The snapshots of one node: which one fits an app, and making a new one. On the node's loop."""

import asyncio
import dataclasses
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nagara import __version__
from nagara.base.errors import NagaraError, UsageError
from nagara.base.units import format_bytes
from nagara.contract.replica import Canary, CaptureReport, ReplicaSpec, SnapshotStatus
from nagara.image.excerpts import STRETCH_BYTES
from nagara.image.trace import NO_TRACE
from nagara.node.asking import canary_answer
from nagara.node.container_runtime import ContainerRuntime
from nagara.node.far_snapshots import FarSnapshots
from nagara.node.frozen_layers import FrozenLayers
from nagara.node.owned_tasks import Leisure, in_thread
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_hooks import before_snapshot
from nagara.node.runtime import Running
from nagara.node.snapshot_images import SnapshotImages
from nagara.sandbox.fault_points import reach
from nagara.sandbox.sockets_open import open_connections
from nagara.snapshot.canary import CanaryError, Question, agree
from nagara.snapshot.capture import Saved, save
from nagara.snapshot.catalog import MEMORY, Catalog, Snapshot, SnapshotRecord, snapshot_from
from nagara.snapshot.condition import Condition, conditions
from nagara.snapshot.device.replica import save_device
from nagara.snapshot.errors import BadSnapshotError, CaptureError, SnapshotError
from nagara.snapshot.levelling import LEVEL, levelled_variant
from nagara.snapshot.processes import processes_of
from nagara.snapshot.resident import resident_parts
from nagara.snapshot.variant import (
    HostFacts,
    NoneFits,
    Variant,
    choose,
    host_class,
    snapshot_key,
)
from nagara.snapshot.vector_use import users_of_avx512
from nagara.store.errors import StoreError
from nagara.store.names import ObjectName

_QUIET_S = 10.0
_FIRST_REQUESTS_S = 2.0  # so long one that was put back is let alone
_TOLD = 1000  # of all snapshots: they must fit into one message

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NoSnapshot:
    """There is none to restore from: why, and whether one should be made."""

    reason: str
    capture_wanted: bool


class NodeSnapshots:
    """Finding and making snapshots.

    Args:
        facts: of this host.
        published: lets the zone know that there are other snapshots here than before; may take
            long, and sees to its own errors.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        facts: HostFacts,
        runtime: ContainerRuntime,
        layers: FrozenLayers,
        images: SnapshotImages,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        self.catalog = catalog
        self._published = published
        self.host_class = host_class(facts)
        self._facts = facts
        self._runtime = runtime
        self._layers = layers
        self._images = images
        self._far = FarSnapshots(catalog, facts)
        self._looking: dict[ReplicaSpec, asyncio.Task[Snapshot | NoSnapshot]] = {}

    def close(self) -> None:
        """Ends what goes on in the background."""
        self._images.close()

    def key(self, spec: ReplicaSpec) -> str:
        """The key that an app's snapshots lie under on hosts with these tools."""
        app = {
            "tenant": spec.tenant,
            "app": spec.app,
            "definition": spec.definition,
            "image": [spec.image, *self._runtime.trees.fingerprint(spec)],
            "command": spec.command,
            "env": sorted(spec.env),
            "port": spec.port,
            "models": sorted((model.name, model.digest) for model in spec.models),
            "canary": [spec.canary.path, spec.canary.body],
        }
        return snapshot_key(app, self._facts, (f"nagara {__version__}",))

    async def find(self, spec: ReplicaSpec) -> Snapshot | NoSnapshot:
        """The snapshot to restore the app from; its files are already being read ahead.

        Starts of one app at the same time share one look.
        """
        looking = self._looking.get(spec)
        if looking is None:
            looking = asyncio.create_task(self._look(spec), name="find a snapshot")
            self._looking[spec] = looking
            looking.add_done_callback(lambda _: self._looking.pop(spec, None))
        return await asyncio.shield(looking)

    async def _look(self, spec: ReplicaSpec) -> Snapshot | NoSnapshot:
        try:
            return await asyncio.to_thread(self._find, spec)
        except (StoreError, UsageError, OSError) as error:  # no start fails for want of a snapshot
            return NoSnapshot(f"the store cannot be asked: {error}", capture_wanted=False)

    def _find(self, spec: ReplicaSpec) -> Snapshot | NoSnapshot:
        key = self.key(spec)
        found = self._find_here(spec, key)
        if isinstance(found, Snapshot):
            return found
        brought = self._far.bring(spec.tenant, spec.app, key)
        if isinstance(brought, NoneFits):
            reasons = "; ".join(brought.reasons)
            return replace(found, reason=f"{found.reason}, and no other machine's fits: {reasons}")
        return self._find_here(spec, key) if brought else found

    def _find_here(self, spec: ReplicaSpec, key: str) -> Snapshot | NoSnapshot:
        by_name = {
            snapshot.name: snapshot for snapshot in self.catalog.all_of(spec.tenant, spec.app, key)
        }
        if not by_name:
            return _none_yet(self.catalog.quarantined(spec.tenant, spec.app, key))
        reason = ""
        for name, snapshot in list(by_name.items()):
            if why := self._images.sealing.misfit(spec.tenant, snapshot.record.sealed_by):
                reason = why
                del by_name[name]
        while by_name:
            variants = {name: snapshot.record.variant for name, snapshot in by_name.items()}
            chosen = choose(variants, self._facts)
            if isinstance(chosen, NoneFits):
                reason = reason or "no variant fits: " + "; ".join(chosen.reasons)
                break
            snapshot = by_name.pop(chosen)
            self._images.read_small(snapshot, self._runtime.runc.programs())
            if (changed := snapshot.record.changed_host_file()) is None:
                # Not before: each of the thousands of names would wait behind it.
                self._images.begin_reading(snapshot, self._runtime.trees.weights(spec))
                return snapshot
            reason = f"{changed} has changed since the snapshot was made"
        return NoSnapshot(reason, capture_wanted=True)

    async def verify(self, snapshot: Snapshot, replica: str) -> None:
        """From now on the replica holds the snapshot's objects.

        Raises `SnapshotError` when it must not be restored.
        """
        await in_thread(self._verify, snapshot, replica)

    def _verify(self, snapshot: Snapshot, replica: str) -> None:
        self._images.pin(replica, snapshot)
        has_tiers = self._images.has_tiers(snapshot.tenant)
        self.catalog.check(snapshot, self._images.cannot_be_had if has_tiers else None)

    async def check_answer(self, running: Running, spec: ReplicaSpec, snapshot: Snapshot) -> None:
        """Asks the canary. Raises `BadSnapshotError` when the answer is not the recorded one."""
        question = question_of(spec.canary)
        try:
            answer = await canary_answer(running.port, question)
        except CanaryError as error:
            raise BadSnapshotError(f"the canary failed: {error}", where=snapshot.name) from error
        if not agree(question, snapshot.record.canary_answer, answer):
            raise BadSnapshotError(
                f"the canary answered {answer[:120]!r} instead of "
                f"{snapshot.record.canary_answer[:120]!r}",
                where=snapshot.name,
            )

    async def count_success(
        self, snapshot: Snapshot, folder: ReplicaFolder, running: Running, leisure: Leisure
    ) -> None:
        """Takes note of a replica put back: only failures in a row put a snapshot aside."""
        await in_thread(self.catalog.forgive, snapshot)
        keep_rest = self._images.afterwards(folder.name)
        is_known = snapshot.record.touches != NO_TRACE
        read = defaultdict[ObjectName, set[int]](set)

        def look() -> None:
            for name, stretches in self._read_by(folder, running.pid).items():
                read[name] |= stretches

        def rest() -> None:
            keep_rest()
            if not is_known:
                look()  # at what its first requests needed, too, unless it has ended
                if read:
                    self._keep_touches(snapshot, read)

        if not is_known:
            leisure.begin(look)
        leisure.begin(rest, _FIRST_REQUESTS_S)

    def _read_by(self, folder: ReplicaFolder, pid: int) -> dict[ObjectName, set[int]]:
        """What a replica put back had to read of its image and models so far: objects, and numbers
        of their stretches; nothing if it has ended."""
        try:
            parts = resident_parts(processes_of(pid), STRETCH_BYTES)
            return self._runtime.trees.objects_of(folder, parts)
        except OSError as error:
            _log.info("%s: what it reads is not known: %s", folder.name, error)
            return {}

    def _keep_touches(self, snapshot: Snapshot, read: Mapping[ObjectName, set[int]]) -> None:
        """Lets other machines know what to fetch first."""
        try:
            touches = self._images.touches(snapshot, read)
            if self.catalog.keep_touches(snapshot, touches):
                self._published()
        except (NagaraError, OSError) as error:
            _log.warning("%s: what it reads is not noted: %s", snapshot.app, error)

    async def count_failure(self, snapshot: Snapshot, error: SnapshotError) -> None:
        """Takes note of a failed restore; a snapshot at fault twice in a row is set aside."""
        if not isinstance(error, BadSnapshotError):
            return
        if await in_thread(self.catalog.count_bad, snapshot, str(error)):
            _log.warning("snapshot %s is in quarantine: %s", snapshot.name, error)
            await self._layers.unmount(snapshot.name)
            await in_thread(self._published)

    async def prepare(self, folder: ReplicaFolder, running: Running, spec: ReplicaSpec) -> str:
        """Before a capture: the canary's answer, hooks, and no connection left open.

        Raises:
            CaptureError: the replica does not answer the same question the same way twice.
        """
        question = question_of(spec.canary)
        try:
            answer = await canary_answer(running.port, question)
            again = await canary_answer(running.port, question)
        except CanaryError as error:
            raise CaptureError(f"the canary failed: {error}", where=spec.app) from error
        if not agree(question, answer, again):
            raise CaptureError(
                "the canary gives another answer each time, so a restored replica could not be "
                f"judged: {answer[:80]!r}, then {again[:80]!r}",
                where=spec.app,
                hint="set snapshot.canary to a request with a fixed answer",
            )
        await before_snapshot(self._runtime.runc, folder, running, spec)
        await self._until_quiet(running.pid, spec.port)
        return answer

    async def _until_quiet(self, pid: int, port: int) -> None:
        """Waits a while for the server's side of our own connections to close."""
        deadline_s = time.monotonic() + _QUIET_S
        while count := open_connections(pid, port):
            if time.monotonic() > deadline_s:
                _log.warning("%d connections are open at capture and are not carried", count)
                return
            await asyncio.sleep(0.02)

    def save(
        self, folder: ReplicaFolder, running: Running, spec: ReplicaSpec, staging: Path
    ) -> Saved:
        """Writes the replica to `staging`; it stays frozen. Blocking. Raises `CaptureError`."""
        save_device(
            self._runtime.devices,
            running.pid,
            staging / MEMORY,
            rebuilds_communicators=spec.hooks.rebuilds_communicators,
        )
        reach("capture.device")
        is_levelled = spec.rules.is_wide and _keeps_to_the_level(running, spec.app)
        saved = save(
            self._runtime.runc,
            folder.name,
            running.pid,
            upper=folder.upper,
            binds=self._runtime.trees.binds(spec),
            opened=self._runtime.opened(folder),
            staging=staging,
            work=folder.criu,
        )
        sealed_by = self._seal(staging, spec)
        return dataclasses.replace(saved, is_levelled=is_levelled, sealed_by=sealed_by)

    def _seal(self, staging: Path, spec: ReplicaSpec) -> str | None:
        """Encrypts what was saved, where that is wanted; returns what names the key."""
        if not self._images.sealing.is_on:
            return None
        try:
            return self._images.sealing.seal(spec.tenant, staging.name, staging)
        except (UsageError, OSError) as error:
            raise CaptureError(f"cannot be sealed: {error}", where=spec.app) from error

    async def publish(
        self, staging: Path, spec: ReplicaSpec, saved: Saved, answer: str
    ) -> CaptureReport:
        """Makes what was saved the app's snapshot. Raises `CaptureError`."""
        try:
            snapshot, replaced = await in_thread(self._publish, staging, spec, saved, answer)
        except (OSError, StoreError, UsageError) as error:
            raise CaptureError(f"cannot be kept: {error}", where=spec.app) from error
        for old in replaced:
            await self._layers.unmount(old)
        await in_thread(self._published)  # whoever hears of the snapshot shall find it
        for note in saved.notes:
            _log.warning("%s: saved without something: %s", spec.app, note)
        return CaptureReport(
            snapshot.name, memory_bytes=saved.memory_bytes, layer_bytes=saved.layer_bytes
        )

    def _publish(
        self, staging: Path, spec: ReplicaSpec, saved: Saved, answer: str
    ) -> tuple[Snapshot, list[str]]:
        record = SnapshotRecord(
            key=self.key(spec),
            variant=_variant(self._facts, saved),
            canary_answer=answer,
            host_files=saved.host_files,
            layer_digest=saved.layer_digest,
            created_at_s=time.time(),
            memory_bytes=saved.memory_bytes,
            layer_bytes=saved.layer_bytes,
            notes=saved.notes,
            sealed_by=saved.sealed_by,
        )
        put = self.catalog.publish(staging, spec.tenant, spec.app, record)
        _log.info(
            "%s: the snapshot has %s in the store, %s of it new",
            spec.app, format_bytes(put.bytes), format_bytes(put.new_bytes),
        )  # fmt: skip
        self._images.trust(spec.tenant, put.shelved.image)
        snapshot = snapshot_from(spec.tenant, put.shelved)
        assert snapshot is not None
        replaced = self.catalog.drop_others_like(snapshot)
        reach("capture.replaced")
        return snapshot, replaced

    async def forget_app(self, tenant: str, app: str) -> None:
        """Removes the app's snapshots."""
        for name in await in_thread(self.catalog.forget_app, tenant, app):
            await self._layers.unmount(name)
        await in_thread(self._published)

    def statuses(self) -> tuple[SnapshotStatus, ...]:
        """The newest of what is saved here. Blocking."""
        found = [_status(one, self._facts) for one in conditions(self.catalog)]
        found.sort(key=lambda status: status.created_at_s, reverse=True)
        return tuple(found[:_TOLD])

    def clear_staging(self) -> None:
        """Ends and removes what captures of an earlier process have left. Blocking."""
        self.catalog.clear_staging()

    def staging(self) -> Path:
        """Where to save into, not made yet."""
        return self.catalog.staging()

    def make_staging(self, staging: Path) -> None:
        """Makes the folder. Blocking. Raises `CaptureError`."""
        try:
            self.catalog.make_staging(staging)
        except OSError as error:
            raise CaptureError(f"cannot be saved: {error}") from error


def _keeps_to_the_level(running: Running, app: str) -> bool:
    """Whether a replica started for a wide snapshot needs no more than the level."""
    why = f"this CPU has not all of {LEVEL}"
    if running.is_levelled:
        users = users_of_avx512(processes_of(running.pid), running.pid, running.avx512_before_s)
        why = f"AVX-512 was used all the same by {', '.join(users)}"
        if not users:
            return True
    _log.warning("%s: its snapshot is for CPUs like this one alone: %s", app, why)
    return False


def _variant(facts: HostFacts, saved: Saved) -> Variant:
    return levelled_variant(facts) if saved.is_levelled else Variant.of_host(facts)


def _status(condition: Condition, facts: HostFacts) -> SnapshotStatus:
    """What is told of a snapshot; of a damaged one, only whose it is."""
    listed, share = condition.listed, condition.share
    status = SnapshotStatus(
        machine=socket.gethostname(),
        tenant=listed.tenant,
        app=listed.app,
        snapshot=listed.name,
        key=listed.key,
        state=condition.state.value,
        stored_bytes=share.stored_bytes,
        shared_bytes=share.shared_bytes,
        here_bytes=condition.here_bytes,
        failures=condition.failures,
        reasons=condition.reasons,
    )
    if listed.snapshot is None:
        return status
    record = listed.snapshot.record
    return dataclasses.replace(
        status,
        cpu_flags=tuple(sorted(record.variant.cpu_flags)),
        is_wide=record.variant.is_levelled,
        misfit=record.variant.misfit(facts),
        memory_bytes=record.memory_bytes,
        layer_bytes=record.layer_bytes,
        created_at_s=record.created_at_s,
    )


def _none_yet(in_quarantine: int) -> NoSnapshot:
    """A bad snapshot may be bad by chance, and is made again; the second of an app is not."""
    if in_quarantine == 0:
        return NoSnapshot("there is no snapshot yet", capture_wanted=True)
    if in_quarantine == 1:
        return NoSnapshot("its snapshot is in quarantine", capture_wanted=True)
    return NoSnapshot(
        "its snapshot is in quarantine, and so is the one before: none is made any more",
        capture_wanted=False,
    )


def question_of(canary: Canary) -> Question:
    """The contract's canary in the snapshot room's words."""
    return Question(canary.path, canary.body, canary.is_openai)
