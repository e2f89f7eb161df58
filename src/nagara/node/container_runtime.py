"""Replicas as containers: overlay root, network namespace, runc under the keeper. Needs root.

Runs on the node's event loop. Mounts and namespace switches take microseconds and are done in
place; whatever waits for a program or a disk goes through a worker thread or the keeper.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from nagara.base.spans import Waterfall
from nagara.contract.node import NodeError, StartFailedError
from nagara.contract.replica import FilesReport, ReplicaSpec
from nagara.image.mounts import mount_points, unmount_tree
from nagara.image.trace import NO_TRACE
from nagara.node.frozen_layers import FrozenLayers
from nagara.node.host_parts import Stopwatch, host_parts, tool_times
from nagara.node.owned_tasks import both, in_thread
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_hooks import hook_environment, renew, wake, write_hook_files
from nagara.node.replica_network import ReplicaNetworks
from nagara.node.replica_trees import ReplicaTrees, Tree
from nagara.node.runtime import Running, substituted
from nagara.node.snapshot_images import SnapshotImages, memory_of
from nagara.sandbox.bundle import Bundle, User, bound_sources
from nagara.sandbox.cdi import DeviceEdits, find_devices
from nagara.sandbox.cgroups import kill_cgroup, remove_cgroup, thaw_cgroup
from nagara.sandbox.fault_points import reach
from nagara.sandbox.identity import set_hostname
from nagara.sandbox.keeper_client import (
    KeeperClient,
    KeeperError,
    LaunchError,
    inherited_environment,
)
from nagara.sandbox.kernel_facts import is_below_run, keep_kernel_facts
from nagara.sandbox.leftovers import kill_tools_in
from nagara.sandbox.netns import NetworkNamespace
from nagara.sandbox.runc import Runc, RuncError, criu_complaint, criu_gave_up
from nagara.snapshot.capture import CRIU_CONFIG
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.device.replica import put_back_device
from nagara.snapshot.errors import BadSnapshotError, CaptureError, RestoreError, SnapshotError
from nagara.snapshot.levelling import levelled_environment
from nagara.snapshot.opened import OpenedFiles
from nagara.snapshot.vector_use import use_before_the_app

_LAUNCH_S = 60.0
_RESTORE_S = 120.0
_END_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_PASSING_LACKS = ("Cannot allocate memory", "No space left", "Too many open files", "Killed")


class ContainerPort:
    """A port inside a replica's network namespace."""

    def __init__(self, namespace: NetworkNamespace, port: int) -> None:
        self._namespace = namespace
        self._port = port

    def open_socket(self) -> tuple[socket.socket, tuple[str, int]]:
        return self._namespace.open_socket(), ("127.0.0.1", self._port)

    def close(self) -> None:
        self._namespace.close()


class ContainerRuntime:
    """Containers below one state folder.

    Args:
        state: the node's folder.
        trees: what lies below the replicas' own layers.
        can_level: whether libraries may be told to use less than this CPU has.
        devices: saves and puts back what replicas have on this machine's devices.
        networks: makes the replicas' network namespaces.
    """

    isolation = "container"

    def __init__(
        self,
        *,
        state: Path,
        trees: ReplicaTrees,
        runc: Runc,
        keeper: KeeperClient,
        layers: FrozenLayers,
        snapshots: SnapshotImages,
        devices: DeviceOrders,
        networks: ReplicaNetworks,
        can_level: bool = False,
    ) -> None:
        self.trees = trees
        self.devices = devices
        self.runc = runc
        self._keeper = keeper
        self._layers = layers
        self._snapshots = snapshots
        self._networks = networks
        self._can_level = can_level
        self._criu_config = state / "criu.conf"
        self._kernel_facts_file = state / "kernel_facts"
        self._kernel_facts: Path | None = None  # where the tool cannot keep them itself
        self._opened: dict[str, OpenedFiles] = {}  # of replicas that are to be saved

    async def open(self) -> None:
        self._criu_config.write_text(CRIU_CONFIG)
        if self.runc.criu:
            kept = in_thread(keep_kernel_facts, self.runc.criu, self._kernel_facts_file)
            self._kernel_facts = await kept
        await self._layers.unmount_all()

    async def took_over(self, replicas: Collection[str]) -> None:
        await in_thread(self.trees.images.reconcile, replicas)
        await self._networks.took_over(replicas)

    def resume(self) -> None:
        self.trees.images.resume()

    async def close(self, *, take_down: bool) -> None:
        await self._layers.unmount_all()
        await in_thread(self.trees.images.close, take_down=take_down)
        if take_down:
            await self._networks.close()

    async def launch(
        self, folder: ReplicaFolder, spec: ReplicaSpec, log: Path, waterfall: Waterfall
    ) -> Running:
        with waterfall.stage("files", "root"):
            tree = await self.trees.prepare(folder, spec, is_restore=False)
            reach("launch.upper")
            write_hook_files(folder.upper, spec, tree.run.identity, is_new=True)
            self._show(tree, folder, spec)
            reach("launch.mounted")
            self._note_opened(folder, spec)
        with contextlib.ExitStack() as undo, waterfall.stage("host", "launch"):
            namespace = await self._networks.create(spec)
            undo.callback(namespace.close)
            await self._write_bundle(folder, spec, tree, namespace)
            reach("launch.bundle")
            command = self.runc.run_command(folder.name, folder.bundle, folder.pid_file)
            try:
                pid = await self._launch(folder, command, log, _LAUNCH_S)
            except LaunchError as error:
                raise StartFailedError(
                    f"the container could not be made: {error.what}", where=spec.app
                ) from error
            reach("launch.running")
            running = Running(pid, ContainerPort(namespace, spec.port))
            if self._is_levelled(folder, spec):
                running.is_levelled = True
                running.avx512_before_s = await in_thread(use_before_the_app, pid)
            undo.pop_all()
        return running

    async def restore(
        self,
        folder: ReplicaFolder,
        spec: ReplicaSpec,
        snapshot: Snapshot,
        log: Path,
        waterfall: Waterfall,
    ) -> Running:
        with waterfall.stage("files", "root"):
            tree = await self._show_snapshot(folder, spec, snapshot)
            reach("restore.image")
            frozen = await self._layers.mount(snapshot)
            reach("restore.layer")
            write_hook_files(folder.upper, spec, tree.run.identity, is_new=False)
            self._show(tree, folder, spec, above=(frozen,))
            reach("restore.mounted")
        launch, hooks = Stopwatch(), Stopwatch()
        with contextlib.ExitStack() as undo:
            with waterfall.stage("host", "restore"), launch.running():
                namespace = await self._networks.create(spec)
                undo.callback(namespace.close)
                await self._write_bundle(folder, spec, tree, namespace)
                reach("restore.bundle")
                command = self.runc.restore_command(
                    folder.name, folder.bundle, folder.pid_file, memory_of(folder), folder.criu
                )
                try:
                    pid = await self._launch(folder, command, log, _RESTORE_S, self._facts(folder))
                except LaunchError as error:
                    lack = await in_thread(self._snapshots.not_fetched, folder.name)
                    raise _restore_failure(folder, snapshot, error, lack) from error
                reach("restore.running")
            telling = asyncio.create_task(in_thread(tool_times, folder.criu / "restore.log"))
            undo.callback(telling.cancel)
            with waterfall.stage("device", "restore"):
                await in_thread(put_back_device, self.devices, pid, memory_of(folder))
                reach("restore.device")
            self._snapshots.unmount(folder)
            with waterfall.stage("host", "identity and hooks"), hooks.running():
                set_hostname(pid, folder.name)
                reach("restore.named")
                running = Running(pid, ContainerPort(namespace, spec.port))
                await renew(folder, running, _app_environment(spec))
            with waterfall.stage("device", "steps of the server"):
                running.weights = await wake(self.runc, folder, running, spec)
                reach("restore.renewed")
            running.host_parts = host_parts(await telling, launch.passed_s, hooks.passed_s)
            undo.pop_all()
        return running

    async def _show_snapshot(
        self, folder: ReplicaFolder, spec: ReplicaSpec, snapshot: Snapshot
    ) -> Tree:
        """Mounts the snapshot, and gives the tree that belongs to it."""
        gathering = await in_thread(self._snapshots.gather, folder, snapshot)
        known = gathering if snapshot.record.touches != NO_TRACE else None
        preparing = self.trees.prepare(folder, spec, is_restore=True, gathering=known)
        mounting = in_thread(self._snapshots.mount, folder, snapshot, gathering)
        tree, _ = await both(preparing, mounting)
        return tree

    def _facts(self, folder: ReplicaFolder) -> Path | None:
        """What the tool is shown of the kernel, unless it needs something of the machine's /run."""
        is_hidden = any(map(is_below_run, bound_sources(folder.bundle)))
        return None if is_hidden else self._kernel_facts

    async def adopt(self, folder: ReplicaFolder, port: int, pid: int) -> Running:
        return Running(pid, ContainerPort(NetworkNamespace.of_process(pid), port))

    async def clear(self, folder: ReplicaFolder) -> None:
        """Order matters: a restore killed half-way leaves a bind mount of the root where runc
        keeps its records, and `runc delete` would then delete *through* it. So first no process
        is left, then no mount, and only then is anything deleted."""
        if opened := self._opened.pop(folder.name, None):
            opened.close()
        await self._keeper.ensure()
        await self._until_ended(folder)
        reach("clear.ended")
        record = self.runc.state / folder.name
        unmount_tree(record)
        reach("clear.unmounted")
        if mounted := mount_points(record):
            raise NodeError("cannot be unmounted; nothing was deleted", where=str(mounted[0]))
        if record.exists():
            try:
                await in_thread(self.runc.delete, folder.name)
            except RuncError:  # may have been killed itself; once more, then it is an error
                await in_thread(self.runc.delete, folder.name)
        reach("clear.deleted")
        unmount_tree(folder.path)
        self._snapshots.forget(folder.name)
        reach("clear.rootless")
        await self.trees.release(folder)
        reach("clear.released")
        await in_thread(remove_cgroup, folder.control_group)
        reach("clear.groupless")
        with contextlib.suppress(KeeperError):
            await self._keeper.forget(folder.name)
        reach("clear.forgotten")

    async def _until_ended(self, folder: ReplicaFolder) -> None:
        """Ends the launcher, the tools that work for the replica and its own processes."""
        pause_s, deadline_s = _FIRST_PAUSE_S, time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            await self._keeper.signal(folder.name, signal.SIGKILL)
            tools = await asyncio.to_thread(kill_tools_in, folder.path)
            processes = kill_cgroup(folder.control_group)
            thaw_cgroup(folder.control_group)
            kept = [child for child in await self._keeper.children() if child.name == folder.name]
            if not tools and not processes and all(c.exit_code is not None for c in kept):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise NodeError(
            f"processes do not end within {_END_S:.0f} s of SIGKILL; nothing was deleted",
            where=folder.name,
        )

    def _environment(self, folder: ReplicaFolder, spec: ReplicaSpec, tree: Tree) -> dict[str, str]:
        own = {**tree.run.env, **_app_environment(spec)}
        is_levelled = self._is_levelled(folder, spec)
        return {
            "HOME": tree.run.identity.home,
            "LANG": "C.UTF-8",
            **tree.run.env,
            "NAGARA_REPLICA": folder.name,
            **_app_environment(spec),
            **hook_environment(spec, own),
            **(levelled_environment(own) if is_levelled else {}),
        }

    def _is_levelled(self, folder: ReplicaFolder, spec: ReplicaSpec) -> bool:
        record = folder.read()
        is_capture = record is not None and record.is_capture
        return is_capture and spec.rules.is_wide and self._can_level

    async def _write_bundle(
        self, folder: ReplicaFolder, spec: ReplicaSpec, tree: Tree, namespace: NetworkNamespace
    ) -> None:
        """Raises `CdiError` when a device is not there."""
        devices = await in_thread(find_devices, spec.devices) if spec.devices else DeviceEdits()
        who = tree.run.identity
        Bundle(
            container=folder.name,
            control_group=folder.control_group,
            root=folder.root,
            command=tuple(substituted(part, _values(spec)) for part in tree.run.command_of(spec)),
            env=self._environment(folder, spec, tree),
            folder=tree.run.folder,
            user=User(who.uid, who.gid, who.groups),
            network_namespace=namespace.path,
            binds=tree.binds,
            cpu_cores=spec.limits.cpu,
            memory_bytes=spec.limits.memory_bytes,
            tasks=_tasks_limit(),
            criu_config=self._criu_config,
            devices=devices,
        ).write(folder.bundle)

    def _show(
        self, tree: Tree, folder: ReplicaFolder, spec: ReplicaSpec, above: tuple[Path, ...] = ()
    ) -> None:
        tree.mount(folder, above=above)
        self._networks.tell_resolvers(folder.root, spec)

    def _note_opened(self, folder: ReplicaFolder, spec: ReplicaSpec) -> None:
        """Begins to note what a replica opens of this machine, if it is one to be saved."""
        record = folder.read()
        binds = self.trees.machine_folders(spec)
        if binds is not None and record is not None and record.is_capture:
            try:
                self._opened[folder.name] = OpenedFiles(folder.root, binds)
            except OSError as error:
                raise CaptureError(
                    f"the kernel does not report which files it opens: {error}", where=record.app
                ) from error

    def opened(self, folder: ReplicaFolder) -> OpenedFiles | None:
        """What a replica that is to be saved has opened since its start; None: nothing of this
        machine."""
        return self._opened.get(folder.name)

    def report(
        self, folder: ReplicaFolder, spec: ReplicaSpec
    ) -> tuple[FilesReport, Callable[[], None] | None]:
        return self.trees.report(folder, spec)

    async def _launch(
        self,
        folder: ReplicaFolder,
        command: list[str],
        log: Path,
        time_limit_s: float,
        kernel_facts: Path | None = None,
    ) -> int:
        await self._keeper.ensure()
        return await self._keeper.launch(
            folder.name,
            command,
            env=inherited_environment(),
            cwd=folder.criu,
            log=log,
            pid_file=folder.pid_file,
            time_limit_s=time_limit_s,
            kernel_facts=kernel_facts,
        )


def _tasks_limit() -> int:
    """Far above what servers have, and a part of the machine's pids, so that no replica can use
    them up."""
    return min(32768, int(Path("/proc/sys/kernel/pid_max").read_text()) // 8)


def _values(spec: ReplicaSpec) -> dict[str, str]:
    return {"PORT": str(spec.port)}


def _app_environment(spec: ReplicaSpec) -> dict[str, str]:
    env = {name: substituted(value, _values(spec)) for name, value in spec.env}
    return {**env, **dict(spec.secrets)}


def _restore_failure(
    folder: ReplicaFolder, snapshot: Snapshot, error: LaunchError, lack: str | None
) -> SnapshotError:
    """Whose fault a failed restore is. The checkpoint tool's own complaint counts against the
    snapshot, unless the tool was killed or complains of what the machine lacks at the moment, or
    `lack`: a part of the snapshot did not come from where it was to be fetched."""
    if lack is not None:
        return RestoreError(f"could not be fetched: {lack}", where=snapshot.name)
    log = folder.criu / "restore.log"
    complaint = criu_complaint(log)
    was_killed = (error.exit_code_of_launcher or 0) < 0 or not criu_gave_up(log)
    if was_killed or complaint is None or any(lack in complaint for lack in _PASSING_LACKS):
        return RestoreError(complaint or error.what, where=snapshot.name)
    return BadSnapshotError(complaint, where=snapshot.name)


def can_run_containers() -> str | None:
    """Why this process cannot make containers; None when it can."""
    if os.geteuid() != 0:
        return "containers and snapshots need root; replicas run as plain processes"
    return None
