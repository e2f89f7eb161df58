"""Replicas as plain processes, for users without root: no isolation, no snapshots.

Each gets a free port of the machine as `${PORT}`. With the machine's own tree, paths below
`/models/NAME` are replaced by where the model really lies. An image is copied out before its
first start, and the copy is each process's root below a layer of its own.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from nagara.base.spans import Waterfall
from nagara.contract.node import NodeError, StartFailedError
from nagara.contract.replica import FilesReport, ReplicaSpec
from nagara.node.owned_tasks import in_thread
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_images import HOST, NodeImages, ReplicaImages
from nagara.node.run_settings import run_settings
from nagara.node.runtime import Running, substituted
from nagara.sandbox.keeper_client import KeeperClient, KeeperError, LaunchError
from nagara.sandbox.leftovers import kill_session, start_mark
from nagara.snapshot.catalog import Snapshot
from nagara.snapshot.errors import RestoreError

_LAUNCH_S = 10.0
_END_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class ProcessPort:
    """A port of the machine itself."""

    def __init__(self, port: int) -> None:
        self._port = port

    def open_socket(self) -> tuple[socket.socket, tuple[str, int]]:
        outside = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return outside, ("127.0.0.1", self._port)

    def close(self) -> None:
        pass


class ProcessRuntime:
    """Processes under the keeper."""

    isolation = "process"

    def __init__(self, *, models: Path, keeper: KeeperClient, images: NodeImages) -> None:
        self._models = models
        self._images = images
        self._shown: dict[str, ReplicaImages] = {}
        self._keeper = keeper

    async def open(self) -> None:
        pass

    async def took_over(self, replicas: Collection[str]) -> None:
        await in_thread(self._images.reconcile, replicas)

    def resume(self) -> None:
        self._images.resume()

    async def close(self, *, take_down: bool) -> None:
        await in_thread(self._images.close, take_down=take_down)

    def report(
        self, folder: ReplicaFolder, spec: ReplicaSpec
    ) -> tuple[FilesReport, Callable[[], None] | None]:
        if (images := self._shown.get(folder.name)) is None:
            return FilesReport(HOST, HOST), None
        return self._images.report(images, spec.tenant)

    async def launch(
        self, folder: ReplicaFolder, spec: ReplicaSpec, log: Path, waterfall: Waterfall
    ) -> Running:
        if spec.image != HOST:
            with waterfall.stage("files", "copy"):
                without = dataclasses.replace(spec, models=())  # they are bound, not copied
                mount = self._images.mount
                images = await in_thread(mount, folder.name, without, is_restore=False)
                self._shown[folder.name] = images
        with waterfall.stage("host", "launch"):
            await self._keeper.ensure()
            port = _free_port()
            (folder.path / "port").write_text(str(port))
            if spec.image == HOST:
                command, env = self._own_command(folder, spec, port)
            else:
                command, env = self._command_in(images, folder, spec, port)
            try:
                pid = await self._keeper.launch(
                    folder.name,
                    command,
                    env=env,
                    cwd=Path("/"),
                    log=log,
                    pid_file=None,
                    time_limit_s=_LAUNCH_S,
                )
            except LaunchError as error:
                raise StartFailedError(
                    f"{command[0]} cannot be run: {error.what}", where=spec.app
                ) from error
            folder.pid_file.write_text(f"{pid} {start_mark(pid) or ''}")
        return Running(pid, ProcessPort(port))

    async def restore(
        self,
        folder: ReplicaFolder,
        spec: ReplicaSpec,
        snapshot: Snapshot,
        log: Path,
        waterfall: Waterfall,
    ) -> Running:
        raise RestoreError("plain processes cannot be restored", where=snapshot.name)

    async def adopt(self, folder: ReplicaFolder, port: int, pid: int) -> Running:
        return Running(pid, ProcessPort(int((folder.path / "port").read_text())))

    async def clear(self, folder: ReplicaFolder) -> None:
        await self._keeper.ensure()
        pause_s, deadline_s = _FIRST_PAUSE_S, time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            await self._keeper.signal(folder.name, signal.SIGKILL)
            left = await asyncio.to_thread(_kill_session_of, folder)
            kept = [child for child in await self._keeper.children() if child.name == folder.name]
            if not left and all(child.exit_code is not None for child in kept):
                with contextlib.suppress(KeeperError):
                    await self._keeper.forget(folder.name)
                self._shown.pop(folder.name, None)
                await in_thread(self._images.release, folder.name)
                with contextlib.suppress(OSError):
                    # Overlay's own: nobody may look into it, and so nobody could remove it.
                    (folder.work / "work").chmod(0o700)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise NodeError(
            f"the process does not end within {_END_S:.0f} s of SIGKILL", where=folder.name
        )

    def _own_command(
        self, folder: ReplicaFolder, spec: ReplicaSpec, port: int
    ) -> tuple[list[str], dict[str, str]]:
        """In this machine's tree."""
        return [self._in_place(part, spec, port) for part in spec.command], {
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "NAGARA_REPLICA": folder.name,
            **{name: self._in_place(value, spec, port) for name, value in spec.env},
            **dict(spec.secrets),
        }

    def _command_in(
        self, images: ReplicaImages, folder: ReplicaFolder, spec: ReplicaSpec, port: int
    ) -> tuple[list[str], dict[str, str]]:
        """In the copy of an image."""
        values = {"PORT": str(port)}
        run = run_settings(images.image)
        env = {**run.env} | {name: substituted(value, values) for name, value in spec.env}
        env |= dict(spec.secrets)
        order = {
            "tree": str(images.layers[0]),
            "upper": str(folder.upper),
            "work": str(folder.work),
            "root": str(folder.root),
            "folder": run.folder,
            "binds": [(str(self._models / m.name), f"/models/{m.name}") for m in spec.models],
            "command": [substituted(part, values) for part in run.command_of(spec)],
            "path": env["PATH"],
        }
        program = [sys.executable, "-P", "-m", "nagara.sandbox.enter_tree", json.dumps(order)]
        own = {"HOME": "/root", "LANG": "C.UTF-8", "NAGARA_REPLICA": folder.name}
        return program, {**own, **env}

    def _in_place(self, text: str, spec: ReplicaSpec, port: int) -> str:
        for model in spec.models:
            inside = f"/models/{model.name}"
            if text == inside or text.startswith(inside + "/"):
                text = str(self._models / model.name) + text[len(inside) :]
        return substituted(text, {"PORT": str(port)})


def _kill_session_of(folder: ReplicaFolder) -> int:
    """Ends what a killed keeper, or a replica that ended by itself, has left running."""
    try:
        pid, started = folder.pid_file.read_text().split()
    except (OSError, ValueError):
        return 0
    return kill_session(int(pid), started)


def _free_port() -> int:
    """A port nobody listens on at the moment. The system does not give it away again soon."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
