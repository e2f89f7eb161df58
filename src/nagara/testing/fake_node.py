"""A node without processes: its replicas are real HTTP servers on loopback, in this loop.

It implements `contract.Node` and does what a test scripts: start times, failures, exits,
unreachability, snapshots. What a replica answers is in `nagara.testing.fake_replica`. Times pass
on the given clock; connections are real.
"""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from nagara.base.clock import Clock, SystemClock
from nagara.contract.node import (
    BadImageError,
    NodeUnavailableError,
    ReplicaGoneError,
    StartFailedError,
)
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
from nagara.testing.fake_replica import FakeReplica


@dataclass(slots=True)
class Script:
    """How one app behaves on the fake node. Seconds are the clock's.

    `failures` are reasons of starts that fail, taken from the front; `always_fails` is a reason
    for every start. `capture_failures` likewise for captures, `failed_restores` for starts that
    are plain though there is a snapshot.
    """

    plain_s: float = 0.0
    restored_s: float = 0.0
    capture_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    always_fails: str | None = None
    capture_failures: list[str] = field(default_factory=list)
    failed_restores: list[str] = field(default_factory=list)
    can_snapshot: bool = False
    snapshot_bytes: int = 1000
    quarantined: str | None = None  # why its snapshot is


class FakeNode:
    """One machine that a test controls.

    Attributes a test may read: `started` and `stopped` (replica names in order), `captured`,
    `live` (by name), `most_live` (the most there were at once).

    Args:
        clock: for start and capture times.
        fails: decides for the conformance suite whether a spec's command cannot start.
    """

    def __init__(
        self, clock: Clock | None = None, fails: Callable[[ReplicaSpec], str | None] | None = None
    ) -> None:
        self.scripts: dict[str, Script] = defaultdict(Script)
        self.live: dict[str, FakeReplica] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.captured: list[str] = []
        self.cancelled: list[str] = []
        self.forgotten: list[tuple[str, str]] = []
        self.most_live = 0
        self.is_reachable = True
        self.images: dict[str, str] = {}  # source → index; others cannot be had
        self.brought: list[ImageOrder] = []
        self.missing: tuple[str, ...] = ()  # what it lacks to save replicas
        self.disk_report = DiskReport(None, (("logs", 0),))
        self.usages: list[ReplicaUsage] = []
        self.files: FilesReport | None = None  # of every start
        self.cache: str | None = None  # where it says that it serves its objects
        self.caches: tuple[str, ...] = ()  # it was told of
        self.told = 0  # so often
        self.host_class = "fake"
        self._clock = clock or SystemClock()
        self._fails = fails or (lambda spec: None)
        self._snapshots: dict[tuple[str, str, str], float] = {}  # when they were made
        self._logs: dict[str, bytes] = {}
        self._ended: dict[str, ReplicaStatus] = {}
        self._listeners: list[asyncio.Queue[ReplicaStatus]] = []

    # -- the protocol ----------------------------------------------------------------------

    async def facts(self) -> NodeFacts:
        """A small machine."""
        self._reach()
        can_snapshot = not self.missing
        return NodeFacts(
            "fake", 2, 2**32, "process", can_snapshot, self.missing,
            cache=self.cache, host_class=self.host_class,
        )  # fmt: skip

    async def use_caches(self, caches: tuple[str, ...]) -> NodeFacts:
        """Keeps them in `caches`."""
        self._reach()
        self.caches = tuple(each for each in caches if each != self.cache)
        self.told += 1
        return await self.facts()

    async def bring_image(self, order: ImageOrder) -> ImageReport:
        """Finds the image in `images`."""
        self._reach()
        if order.image not in self.images:
            raise BadImageError("there is no such image", where=order.image)
        self.brought.append(order)
        return ImageReport(self.images[order.image], files=1, size_bytes=1000, new_bytes=0)

    async def start(self, order: StartOrder) -> StartReport:
        """Starts a server after the scripted time, or fails as scripted."""
        self._reach()
        spec = order.spec
        script = self.scripts[spec.app]
        has_snapshot = spec.snapshot and not script.quarantined and _key(spec) in self._snapshots
        fallback = script.failed_restores.pop(0) if script.failed_restores else None
        is_restored = has_snapshot and fallback is None
        seconds = script.restored_s if is_restored else script.plain_s
        begun_s = self._clock.monotonic_s()
        replica = await self._boot(order, seconds)
        reason = self._failure(spec, script)
        if reason is not None:
            await asyncio.shield(replica.end())
            self._logs[order.replica] = reason.encode()
            raise StartFailedError(f"the command ended: {reason}", where=order.replica)
        self.started.append(order.replica)
        self.live[order.replica] = replica
        self.most_live = max(self.most_live, len(self.live))
        stage = "host" if is_restored else "device"
        return StartReport(
            replica=order.replica,
            kind=StartKind.RESTORED if is_restored else StartKind.PLAIN,
            stages={"files": 0.0, stage: seconds},
            elapsed_s=self._clock.monotonic_s() - begun_s,
            snapshot="fake-snapshot" if is_restored else None,
            fallback=fallback,
            failed_snapshot=None if fallback is None else "fake-snapshot",
            files=self.files,
            capture_wanted=spec.snapshot and script.can_snapshot and not has_snapshot,
        )

    async def capture(self, order: CaptureOrder) -> CaptureReport:
        """Makes the app's later starts restored ones after the scripted time."""
        self._reach()
        script = self.scripts[order.spec.app]
        try:
            await self._clock.sleep(script.capture_s)
        except asyncio.CancelledError:
            self.cancelled.append(order.replica)
            raise
        if script.capture_failures:
            return CaptureReport(snapshot=None, reason=script.capture_failures.pop(0))
        self._snapshots[_key(order.spec)] = self._clock.wall_s()
        self.captured.append(order.replica)
        return CaptureReport(
            "fake-snapshot", None, script.snapshot_bytes, script.snapshot_bytes // 100,
            script.capture_s,
        )  # fmt: skip

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        """Ends a replica; its connections are closed."""
        self._reach()
        running = self.live.pop(replica, None)
        self._ended.pop(replica, None)
        if running is not None:
            self.stopped.append(replica)
            self._logs[replica] = running.log_text()
            await running.end()

    async def dial(self, replica: str) -> socket.socket:
        """A connection to the replica's port."""
        self._reach()
        running = self.live.get(replica)
        if running is None:
            raise ReplicaGoneError("no such replica here", where=replica)
        connected = socket.socket()
        connected.setblocking(False)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connected, ("127.0.0.1", running.port))
        except BaseException:
            connected.close()
            raise
        return connected

    async def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Those that run and those that ended by themselves."""
        self._reach()
        return (*(_status(replica) for replica in self.live.values()), *self._ended.values())

    async def usage(self) -> tuple[ReplicaUsage, ...]:
        """What `usages` says of those that run."""
        self._reach()
        return tuple(u for u in self.usages if u.replica in self.live)

    async def disk(self) -> DiskReport:
        """As given."""
        self._reach()
        return self.disk_report

    async def exits(self) -> AsyncIterator[ReplicaStatus]:
        """What `exit_replica` ends, as it happens."""
        self._reach()
        queue: asyncio.Queue[ReplicaStatus] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.remove(queue)

    async def logs(self, replica: str, *, tail_bytes: int = 65536) -> bytes:
        """What the replica printed."""
        self._reach()
        running = self.live.get(replica)
        text = self._logs.get(replica) if running is None else running.log_text()
        if text is None:
            raise ReplicaGoneError("no log of such a replica is kept", where=replica)
        return text[-tail_bytes:]

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """One for each app that was captured."""
        self._reach()
        return tuple(self._saved(*key, at_s) for key, at_s in sorted(self._snapshots.items()))

    def _saved(self, tenant: str, app: str, definition: str, at_s: float) -> SnapshotStatus:
        script = self.scripts[app]
        why, size_bytes = script.quarantined, script.snapshot_bytes
        return SnapshotStatus(
            *("fake", tenant, app, "fake-snapshot", definition),
            "in quarantine" if why else "good",
            cpu_flags=("avx2", "fma", "sse4_2"),
            memory_bytes=size_bytes,
            layer_bytes=size_bytes // 100,
            stored_bytes=size_bytes * 9 // 10,
            shared_bytes=size_bytes // 10,
            created_at_s=at_s,
            failures=2 if why else 0,
            reasons=(f"failed: {why}",) if why else (),
        )

    async def forget_app(self, tenant: str, app: str) -> None:
        """Removes the app's snapshots."""
        self._reach()
        self.forgotten.append((tenant, app))
        self._snapshots = {
            key: at_s for key, at_s in self._snapshots.items() if key[:2] != (tenant, app)
        }

    # -- what a test does to it ------------------------------------------------------------

    async def exit_replica(
        self, replica: str, code: int = 1, *, is_seen: bool = True, reason: str | None = None
    ) -> None:
        """The replica ends, by itself or for a reason. Unseen, only `replicas` tells it."""
        running = self.live.pop(replica)
        await running.end()
        status = ReplicaStatus(
            replica, running.order.spec.tenant, running.order.spec.app,
            running.order.spec.definition, running.order.lease, ready=False, exit_code=code,
            detail={} if reason is None else {"reason": reason},
        )  # fmt: skip
        self._ended[replica] = status
        self._logs[replica] = running.log_text()
        if is_seen:
            for queue in self._listeners:
                queue.put_nowait(status)

    async def close(self) -> None:
        """Ends all servers."""
        for replica in list(self.live.values()):
            await replica.end()
        self.live.clear()

    def _reach(self) -> None:
        if not self.is_reachable:
            raise NodeUnavailableError("the fake node is out of reach")

    async def _boot(self, order: StartOrder, seconds: float) -> FakeReplica:
        replica = FakeReplica(order, self._exited)
        try:
            await replica.begin()
            await self._clock.sleep(seconds)
        except BaseException:
            self.cancelled.append(order.replica)
            await asyncio.shield(replica.end())
            raise
        return replica

    def _failure(self, spec: ReplicaSpec, script: Script) -> str | None:
        if script.failures:
            return script.failures.pop(0)
        return script.always_fails or self._fails(spec)

    async def _exited(self, replica: str, code: int) -> None:
        if replica in self.live:
            await self.exit_replica(replica, code)


def _key(spec: ReplicaSpec) -> tuple[str, str, str]:
    return (spec.tenant, spec.app, spec.definition)


def _status(replica: FakeReplica) -> ReplicaStatus:
    spec = replica.order.spec
    return ReplicaStatus(
        replica.order.replica, spec.tenant, spec.app, spec.definition, replica.order.lease,
        ready=True,
    )  # fmt: skip
