"""Replicas as containers: overlay root, network namespace, runc under the keeper. Needs root.

Runs on the node's event loop. Mounts and namespace switches take microseconds and are done in
place; whatever waits for a program or a disk goes through a worker thread or the keeper.
"""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

from nagara.base.spans import Waterfall
from nagara.contract.node import StartFailedError
from nagara.contract.replica import ModelMount, ReplicaSpec
from nagara.image.host import HostImage
from nagara.image.mounts import MountError, mount_overlay, unmount_tree
from nagara.node.frozen_layers import FrozenLayers
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.runtime import Running, substituted
from nagara.sandbox.bundle import Bind, Bundle
from nagara.sandbox.cgroups import kill_cgroup, remove_cgroup
from nagara.sandbox.identity import set_hostname
from nagara.sandbox.keeper_client import KeeperClient, KeeperError, inherited_environment
from nagara.sandbox.netns import NetworkNamespace
from nagara.sandbox.runc import Runc, RuncError, criu_complaint
from nagara.snapshot.capture import CRIU_CONFIG
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.errors import RestoreError
from nagara.snapshot.hooks import SOCKET_VARIABLE
from nagara.snapshot.renewal import HOOK_SOCKET, call_hook

_LAUNCH_S = 60.0
_RESTORE_S = 120.0
_HOOK_S = 30.0
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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
        models: folder of the machine's model folders.
        programs: folder of programs to find first, such as an environment's `bin`.
    """

    isolation = "container"

    def __init__(
        self,
        *,
        state: Path,
        models: Path,
        programs: Path,
        image: HostImage,
        runc: Runc,
        keeper: KeeperClient,
        layers: FrozenLayers,
    ) -> None:
        self._models = models
        self._path = f"{programs}:{_SYSTEM_PATH}"
        self._image = image
        self._needed = image.bound_folders()
        self.runc = runc
        self._keeper = keeper
        self._layers = layers
        self._criu_config = state / "criu.conf"
        self._criu_config.write_text(CRIU_CONFIG)

    async def launch(
        self, folder: ReplicaFolder, spec: ReplicaSpec, log: Path, waterfall: Waterfall
    ) -> Running:
        with waterfall.stage("files", "root"):
            self._image.prepare_upper(folder.upper)
            mount_overlay(self._image.layers, folder.upper, folder.work, folder.root)
        with waterfall.stage("host", "launch"):
            namespace = self._namespace_and_bundle(folder, spec)
            command = self.runc.run_command(folder.name, folder.bundle, folder.pid_file)
            try:
                pid = await self._launch(folder, command, log, _LAUNCH_S)
            except KeeperError as error:
                namespace.close()
                raise StartFailedError(
                    f"the container could not be made: {error.what}", where=spec.app
                ) from error
        return Running(pid, ContainerPort(namespace, spec.port))

    async def restore(
        self,
        folder: ReplicaFolder,
        spec: ReplicaSpec,
        snapshot: Snapshot,
        log: Path,
        waterfall: Waterfall,
    ) -> Running:
        with waterfall.stage("files", "root"):
            frozen = await self._layers.mount(snapshot)
            try:
                layers = (frozen, *self._image.layers)
                mount_overlay(layers, folder.upper, folder.work, folder.root)
            except MountError as error:
                raise RestoreError(str(error), where=snapshot.name) from error
        with waterfall.stage("host", "restore"):
            namespace = self._namespace_and_bundle(folder, spec)
            command = self.runc.restore_command(
                folder.name, folder.bundle, folder.pid_file, snapshot.memory, folder.criu
            )
            try:
                pid = await self._launch(folder, command, log, _RESTORE_S)
            except KeeperError as error:
                namespace.close()
                reason = criu_complaint(folder.criu / "restore.log") or error.what
                raise RestoreError(reason, where=snapshot.name) from error
        with waterfall.stage("host", "identity and hooks"):
            try:
                set_hostname(pid, folder.name)
                await self._renew(folder, spec, pid)
            except BaseException:
                namespace.close()
                raise
        return Running(pid, ContainerPort(namespace, spec.port))

    async def adopt(self, folder: ReplicaFolder, port: int, pid: int) -> Running:
        return Running(pid, ContainerPort(NetworkNamespace.of_process(pid), port))

    async def clear(self, folder: ReplicaFolder, *, paused: bool = False) -> None:
        """Order matters: a restore killed half-way leaves a bind mount of the root where runc
        keeps its records, and `runc delete` would then delete *through* it. So first no process
        is left, then no mount, and only then is anything deleted."""
        await self._keeper.signal(folder.name, signal.SIGKILL)
        kill_cgroup(folder.name)
        if paused:
            with contextlib.suppress(RuncError):  # not paused after all
                await asyncio.to_thread(self.runc.resume, folder.name)
        await self._until_ended(folder.name)
        record = self.runc.state / folder.name
        unmount_tree(record)
        if record.exists():
            await asyncio.to_thread(self.runc.delete, folder.name)
        unmount_tree(folder.path)
        remove_cgroup(folder.name)
        with contextlib.suppress(KeeperError):
            await self._keeper.forget(folder.name)

    async def _until_ended(self, name: str) -> None:
        for _ in range(500):
            kept = [child for child in await self._keeper.children() if child.name == name]
            if not kill_cgroup(name) and all(child.exit_code is not None for child in kept):
                return
            await asyncio.sleep(0.02)
        raise RestoreError("processes do not end after SIGKILL; nothing was deleted", where=name)

    def _namespace_and_bundle(self, folder: ReplicaFolder, spec: ReplicaSpec) -> NetworkNamespace:
        namespace = NetworkNamespace.create()
        values = {"PORT": str(spec.port)}
        env = {
            "PATH": self._path,
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "NAGARA_REPLICA": folder.name,
            SOCKET_VARIABLE: str(HOOK_SOCKET),
            **{name: substituted(value, values) for name, value in spec.env},
        }
        needed = tuple(Bind(path, path) for path in self._needed)
        Bundle(
            container=folder.name,
            root=folder.root,
            command=tuple(substituted(part, values) for part in spec.command),
            env=env,
            network_namespace=namespace.path,
            binds=needed + tuple(self.model_bind(model) for model in spec.models),
            cpu_cores=spec.limits.cpu,
            memory_bytes=spec.limits.memory_bytes,
            criu_config=self._criu_config,
        ).write(folder.bundle)
        return namespace

    def model_bind(self, model: ModelMount) -> Bind:
        """How a replica sees a model folder."""
        return Bind(self._models / model.name, Path("/models") / model.name)

    def binds(self, spec: ReplicaSpec) -> dict[Path, Path]:
        """Folders shown to a replica: path inside → path on the machine."""
        shown = {path: path for path in self._needed}
        models = (self.model_bind(model) for model in spec.models)
        return shown | {bind.target: bind.source for bind in models}

    async def _launch(
        self, folder: ReplicaFolder, command: list[str], log: Path, time_limit_s: float
    ) -> int:
        return await self._keeper.launch(
            folder.name,
            command,
            env=inherited_environment(),
            log=log,
            pid_file=folder.pid_file,
            time_limit_s=time_limit_s,
        )

    async def _renew(self, folder: ReplicaFolder, spec: ReplicaSpec, pid: int) -> None:
        request = {"do": "after_restore", "replica": folder.name, "env": dict(spec.env)}
        await asyncio.to_thread(call_hook, pid, request, timeout_s=_HOOK_S)


def can_run_containers() -> str | None:
    """Why this process cannot make containers; None when it can."""
    if os.geteuid() != 0:
        return "containers and snapshots need root; replicas run as plain processes"
    return None
