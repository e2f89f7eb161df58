"""NVIDIA's devices. The driver is asked by a process of its own, which is killed when it hangs.

A driver call cannot be given up from within: it may wait for ever for a process that has ended.
So each call goes to a worker (see `cuda_worker`) over a pipe, and comes back in time or not at
all. Workers stay for the next call, and several calls have a worker each. Safe to use from
several threads.
"""

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nagara.snapshot.device.cpu import resident_bytes
from nagara.snapshot.device.errors import (
    DeviceBusyError,
    DeviceError,
    DeviceFullError,
    DeviceGoneError,
    DeviceLostError,
    DeviceMissingError,
    DeviceRefusedError,
    DeviceSilentError,
)
from nagara.snapshot.device.protocol import DeviceFacts
from nagara.snapshot.states import DeviceEvent, DeviceState, can

WORKER = (sys.executable, "-m", "nagara.snapshot.device.cuda_worker")
QUICK_S = 30.0  # a question; its first includes loading the driver
GRACE_S = 2.0  # for a lock's own time-out to come first
_LIBRARY = b"/libcuda.so"
_TOO_LARGE = ("OUT_OF_MEMORY", "out of memory")


class _CallError(Exception):
    """The driver refused or failed; its words."""


class _Worker:
    """One process that asks the driver."""

    def __init__(self, command: tuple[str, ...]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceMissingError(f"cannot be run: {error}", where=command[0]) from error

    def ask(self, request: Mapping[str, Any], time_limit_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(time_limit_s))
        except (OSError, ValueError) as error:
            raise DeviceLostError(f"what asks the driver has ended: {error}") from error
        if "error" not in answer:
            return answer["ok"]
        if answer["kind"] == "missing":
            raise DeviceMissingError(answer["error"], where="cuda")
        raise _CallError(answer["error"])

    def _line(self, time_limit_s: float) -> bytes:
        assert self._process.stdout is not None
        end_s, line = time.monotonic() + time_limit_s, b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise DeviceSilentError(f"the driver did not answer in {time_limit_s:.0f} s")
            part = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not part:
                raise OSError("no answer")
            line += part
        return line

    def end(self) -> None:
        """Kills it. One that the driver holds may stay; it is nobody's then."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class CudaDevice:
    """All NVIDIA devices of this machine.

    Args:
        command: what asks the driver; it speaks as `cuda_worker` does.
    """

    kind = "cuda"

    def __init__(self, command: tuple[str, ...] = WORKER) -> None:
        self._command = command
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the workers that rest."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def facts(self) -> DeviceFacts:
        try:
            found = self._ask({"do": "facts"}, QUICK_S)
        except _CallError as error:
            raise DeviceMissingError(str(error), where="cuda") from error
        devices = found["devices"]
        return DeviceFacts(
            self.kind,
            found["driver"],
            {device["uuid"]: device["total"] for device in devices},
            can_save=found["why_not"] is None and bool(devices),
            can_map=found["can_map"],
            why_not=found["why_not"] or (None if devices else "the driver sees no device"),
            names={device["uuid"]: device["name"] for device in devices},
            way=found.get("way", ""),
        )

    def holders(self, pids: Collection[int]) -> tuple[int, ...]:
        found = []
        # Whoever has not even the driver's library does not use a device: no need to ask it.
        for pid in sorted(pid for pid in pids if _has_library(pid)):
            with contextlib.suppress(_CallError):  # the driver does not know it
                self._ask({"do": "state", "pid": pid}, QUICK_S)
                found.append(pid)
        return tuple(found)

    def state(self, pid: int) -> DeviceState:
        try:
            return DeviceState(self._ask({"do": "state", "pid": pid}, QUICK_S))
        except _CallError as error:
            self._gone_or(pid, DeviceLostError(str(error), where=f"process {pid}"))
        except ValueError as error:  # a state that this version does not know
            raise DeviceLostError(str(error), where=f"process {pid}") from error

    def held_bytes(self, pid: int) -> Mapping[str, int]:
        return self._figures({"do": "held", "pid": pid})

    def kept_bytes(self, pid: int) -> int:
        return resident_bytes(pid)

    def free_bytes(self) -> Mapping[str, int]:
        return self._figures({"do": "free"})

    def lock(self, pid: int, *, time_limit_s: float) -> None:
        request = {"do": "lock", "pid": pid, "timeout_ms": max(1, int(time_limit_s * 1000))}
        try:
            self._change(DeviceEvent.LOCK, request, time_limit_s + GRACE_S)
        except _CallError as error:
            # The driver leaves it RUNNING when the time is over, whatever words it has for that.
            if self.state(pid) is DeviceState.RUNNING:
                raise DeviceBusyError(
                    f"could not be locked in {time_limit_s:g} s: {error}", where=f"process {pid}"
                ) from error
            raise DeviceLostError(f"lock: {error}", where=f"process {pid}") from error

    def checkpoint(self, pid: int, *, time_limit_s: float) -> None:
        self._change_or_lose(DeviceEvent.CHECKPOINT, {"pid": pid}, time_limit_s)

    def restore(self, pid: int, device_map: Mapping[str, str], *, time_limit_s: float) -> None:
        request = {"pid": pid, "device_map": dict(device_map)}
        self._change_or_lose(DeviceEvent.RESTORE, request, time_limit_s)

    def unlock(self, pid: int, *, time_limit_s: float) -> None:
        self._change_or_lose(DeviceEvent.UNLOCK, {"pid": pid}, time_limit_s)

    def _change_or_lose(
        self, event: DeviceEvent, request: Mapping[str, Any], time_limit_s: float
    ) -> None:
        try:
            self._change(event, {"do": event.value, **request}, time_limit_s)
        except _CallError as error:
            text, where = f"{event}: {error}", f"process {request['pid']}"
            is_full = any(words in text for words in _TOO_LARGE)
            kind = DeviceFullError if is_full else DeviceLostError
            self._gone_or(request["pid"], kind(text, where=where))

    def _change(self, event: DeviceEvent, request: Mapping[str, Any], time_limit_s: float) -> None:
        state = self.state(request["pid"])
        if not can(state, event):
            raise DeviceRefusedError(f"is {state}: no {event}", where=f"process {request['pid']}")
        self._ask(request, time_limit_s)

    def _figures(self, request: Mapping[str, Any]) -> Mapping[str, int]:
        try:
            found = self._ask(request, QUICK_S)
        except _CallError as error:
            raise DeviceMissingError(str(error), where="cuda") from error
        return {str(uuid): int(size) for uuid, size in found.items()}

    def _gone_or(self, pid: int, error: DeviceError) -> NoReturn:
        if not Path(f"/proc/{pid}").exists():
            raise DeviceGoneError("has ended", where=f"process {pid}") from error
        raise error

    def _ask(self, request: Mapping[str, Any], time_limit_s: float) -> Any:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self._command)
        try:
            answer = worker.ask(request, time_limit_s)
        except (_CallError, DeviceMissingError):
            self._rest(worker)
            raise
        except BaseException:
            worker.end()
            raise
        self._rest(worker)
        return answer

    def _rest(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)


def _has_library(pid: int) -> bool:
    try:
        return _LIBRARY in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:  # ended meanwhile
        return False
