"""Talking to the keeper, and starting it where it is missing.

`KeeperClient` belongs to one event loop. One request at a time per connection; launches, which
may take long, use a connection of their own.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.base.errors import NagaraError
from nagara.sandbox.unix_socket import connect

_QUICK_S = 10.0
_START_S = 10.0
_TRIES, _PAUSE_S = 50, 0.01


class KeeperError(NagaraError):
    """The keeper refused, or cannot be reached."""


class LaunchError(KeeperError):
    """The process or container did not come to be. `exit_code` is the launcher's, if it ran."""

    exit_code_of_launcher: int | None = None


@dataclass(frozen=True, slots=True)
class KeptChild:
    """A replica as the keeper knows it."""

    name: str
    pid: int | None
    exit_code: int | None  # None while it runs; negative is a signal's number


class KeeperClient:
    """Requests to the keeper at one socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._leases: dict[str, dict[str, Any]] = {}  # by replica; its launches carry it

    async def ensure(self) -> None:
        """Starts a keeper unless one answers. It outlives this process."""
        if await self._answers():
            return
        deadline_s = time.monotonic() + _START_S
        while not await self._started():  # again where an earlier one was just about to end
            if time.monotonic() > deadline_s:
                raise KeeperError(
                    "the keeper did not start",
                    where=str(self._path),
                    hint=f"its output is in {self._path.with_suffix('.log')}",
                )

    async def _started(self) -> bool:
        log = self._path.with_suffix(".log").open("ab")
        with log:
            starter = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nagara.sandbox.keeper", str(self._path)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
            await starter.wait()
        for _ in range(_TRIES):
            if await self._answers():
                return True
            await asyncio.sleep(_PAUSE_S)
        return False

    async def launch(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        pid_file: Path | None,
        time_limit_s: float,
        kernel_facts: Path | None = None,
    ) -> int:
        """Runs `argv` in `cwd` as a replica and returns the pid of the replica's first process.

        With `pid_file`, `argv` creates a container, ends, and leaves the pid in that file. With
        `kernel_facts` it sees what the checkpoint tool has found out.

        Raises:
            LaunchError: it did not come to be within the limit; what it wrote is in `log`.
        """
        request = {
            "op": "launch",
            "id": name,
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(cwd),
            "log": str(log),
            "pid_file": str(pid_file) if pid_file else None,
            "kernel_facts": str(kernel_facts) if kernel_facts else None,
            "lease": self._leases.get(name),
        }
        answer = await self._ask(request, time_limit_s)
        if "error" in answer:
            failure = LaunchError(answer["error"], where=name)
            failure.exit_code_of_launcher = answer.get("exit_code")
            raise failure
        return int(answer["pid"])

    async def children(self) -> tuple[KeptChild, ...]:
        """All replicas, running or ended and not yet forgotten."""
        answer = await self._request({"op": "list"})
        return tuple(_child(entry) for entry in answer["children"])

    async def signal(self, name: str, number: int) -> None:
        """Sends a signal to the replica; ended and unknown ones are passed over."""
        await self._request({"op": "signal", "id": name, "signal": number})

    async def forget(self, name: str) -> None:
        """Drops an ended replica from the list."""
        await self._request({"op": "forget", "id": name})

    async def drain(self, name: str) -> None:
        """Afterwards all that the replica has written before (64 KiB at most) is in its log."""
        await self._request({"op": "drain", "id": name})

    async def begin_lease(
        self, name: str, slot: str, epoch: int, end_s: float | None
    ) -> tuple[str, ...]:
        """Puts a replica to be launched under a lease; returns the replicas it displaces.

        `end_s` is a reading of this machine's boot-time clock; None: it has no end.

        Raises:
            KeeperError: the lease is over, or its slot has been granted to another since.
        """
        lease = {"slot": slot, "epoch": epoch, "end_s": end_s}
        answer = await self._request({"op": "lease", "id": name, "lease": lease})
        self._leases[name] = lease
        return tuple(answer["ended"])

    async def end_lease(self, name: str) -> None:
        """The replica is gone: nothing needs to be ended for its lease."""
        self._leases.pop(name, None)
        await self._request({"op": "unlease", "id": name})

    async def renew(self, renewals: Sequence[Mapping[str, Any]]) -> tuple[float, tuple[str, ...]]:
        """Prolongs leases: (the clock's present reading, slots that were not prolonged)."""
        answer = await self._request({"op": "renew", "renewals": [dict(one) for one in renewals]})
        return float(answer["mark_s"]), tuple(answer["refused"])

    async def fence(self, slot: str, epoch: int) -> tuple[str, ...]:
        """Kills what runs under older epochs and refuses such; returns the replicas concerned."""
        answer = await self._request({"op": "fence", "slot": slot, "epoch": epoch})
        return tuple(answer["ended"])

    async def shutdown(self) -> None:
        """Ends the keeper. Raises `KeeperError` while a replica runs."""
        await self._request({"op": "shutdown"})

    async def exits(self) -> AsyncIterator[KeptChild]:
        """Yields each replica that has ended or ends; those forgotten are not repeated.

        Raises `KeeperError` when the keeper cannot be reached or has ended.
        """
        reader, writer = await self._connect()
        try:
            writer.write(b'{"op": "watch"}\n')
            await reader.readline()
            while line := await reader.readline():
                yield _child(json.loads(line)["exited"])
        except OSError as error:
            raise KeeperError(f"has ended: {error}", where=str(self._path)) from error
        finally:
            writer.close()
        raise KeeperError("has ended", where=str(self._path))

    async def _answers(self) -> bool:
        try:
            await self._request({"op": "list"})
        except KeeperError:
            return False
        return True

    async def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await self._ask(request, _QUICK_S)
        if "error" in answer:
            raise KeeperError(answer["error"], where=str(self._path))
        return answer

    async def _ask(self, request: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(time_limit_s):
                reader, writer = await self._connect()
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError as error:
            raise KeeperError(
                f"no answer to {request['op']} within {time_limit_s:.0f} s", where=str(self._path)
            ) from error
        except OSError as error:
            raise KeeperError(f"cannot be reached: {error}", where=str(self._path)) from error
        if not line.endswith(b"\n"):
            raise KeeperError("the keeper ended in the middle of a request", where=str(self._path))
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            connection = connect(self._path, timeout_s=_QUICK_S)
        except OSError as error:
            raise KeeperError(f"cannot be reached: {error}", where=str(self._path)) from error
        return await asyncio.open_unix_connection(sock=connection, limit=4 << 20)


def _child(entry: Mapping[str, Any]) -> KeptChild:
    return KeptChild(entry["id"], entry["pid"], entry["exit_code"])


def inherited_environment() -> dict[str, str]:
    """What a launcher such as runc needs of this process's environment, and no more."""
    return {"PATH": os.environ.get("PATH", os.defpath)}
