"""Replicas as plain processes, for users without root: no isolation, no snapshots.

Each gets a free port of the machine as `${PORT}`; paths below `/models/NAME` are replaced by
where the model really lies.
"""

import asyncio
import contextlib
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
from nagara.node.replica_folder import ReplicaFolder
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

    def __init__(self, *, models: Path, keeper: KeeperClient) -> None:
        self._models = models
        self._keeper = keeper

    async def open(self) -> None:
        pass

    async def took_over(self, replicas: Collection[str]) -> None:
        pass

    async def close(self, *, take_down: bool) -> None:
        pass

    def report(
        self, folder: ReplicaFolder, spec: ReplicaSpec
    ) -> tuple[FilesReport, Callable[[], None] | None]:
        return FilesReport("host", "host"), None

    async def launch(
        self, folder: ReplicaFolder, spec: ReplicaSpec, log: Path, waterfall: Waterfall
    ) -> Running:
        with waterfall.stage("host", "launch"):
            await self._keeper.ensure()
            port = _free_port()
            (folder.path / "port").write_text(str(port))
            command = [self._in_place(part, spec, port) for part in spec.command]
            env = {
                **os.environ,
                "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', os.defpath)}",
                "NAGARA_REPLICA": folder.name,
                **{name: self._in_place(value, spec, port) for name, value in spec.env},
            }
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
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise NodeError(
            f"the process does not end within {_END_S:.0f} s of SIGKILL", where=folder.name
        )

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
