"""Asks NVIDIA's driver, in a process of its own: `python -m nagara.snapshot.device.cuda_worker`.

One JSON object a line comes in and one goes out:

    {"do": "lock", "pid": 7, "timeout_ms": 10000}  →  {"ok": null}
                                                       {"error": "...", "kind": "missing"|"call"}

The driver's checkpoint calls come from `cuda.core.checkpoint` (package `cuda-core`, driver 570 or
newer); without it, from the command `cuda-checkpoint`. Memory is asked of the management library
(package `nvidia-ml-py`), which makes no context. A driver that hangs hangs this process, which
the other side then kills: this is why it has one.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

OLDEST_DRIVER, OLDEST_MAPPING_DRIVER = 570, 580
# uuids have this prefix in the management library and the command, and none in cuda-core.
_UUID_PREFIX = "GPU-"


class MissingError(Exception):
    """No driver, or nothing to ask it with."""


class Way(Protocol):
    """One of the ways to the driver's checkpoint calls. Each raises RuntimeError or OSError."""

    def state(self, pid: int) -> str: ...

    def lock(self, pid: int, timeout_ms: int) -> None: ...

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int, device_map: Mapping[str, str]) -> None: ...

    def unlock(self, pid: int) -> None: ...


class CudaCore:
    """Through `cuda.core.checkpoint`."""

    def __init__(self) -> None:
        try:
            from cuda.core import checkpoint
        except ImportError as error:
            raise MissingError(f"cuda-core is not installed: {error}") from error
        self._process: Callable[[int], Any] = checkpoint.Process

    def state(self, pid: int) -> str:
        return str(self._process(pid).state)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._process(pid).lock(timeout_ms=timeout_ms)

    def checkpoint(self, pid: int) -> None:
        self._process(pid).checkpoint()

    def restore(self, pid: int, device_map: Mapping[str, str]) -> None:
        bare = {
            old.removeprefix(_UUID_PREFIX): new.removeprefix(_UUID_PREFIX)
            for old, new in device_map.items()
        }
        self._process(pid).restore(gpu_mapping=bare or None)

    def unlock(self, pid: int) -> None:
        self._process(pid).unlock()


class CudaCheckpoint:
    """Through the command `cuda-checkpoint`."""

    def __init__(self) -> None:
        found = shutil.which("cuda-checkpoint")
        if found is None:
            raise MissingError("neither cuda-core nor the command cuda-checkpoint is installed")
        self._program = found

    def state(self, pid: int) -> str:
        return self._run("--get-state", "--pid", str(pid)).strip()

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._act("lock", pid, "--timeout", str(timeout_ms))

    def checkpoint(self, pid: int) -> None:
        self._act("checkpoint", pid)

    def restore(self, pid: int, device_map: Mapping[str, str]) -> None:
        pairs = ",".join(f"{old}={new}" for old, new in device_map.items())
        self._act("restore", pid, *(("--device-map", pairs) if pairs else ()))

    def unlock(self, pid: int) -> None:
        self._act("unlock", pid)

    def _act(self, action: str, pid: int, *more: str) -> None:
        self._run("--action", action, "--pid", str(pid), *more)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self._program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RuntimeError(said[-1] if said else f"it ended with {done.returncode}")
        return done.stdout


class Nvml:
    """What is on the devices, and how much of it is whose."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise MissingError(f"nvidia-ml-py is not installed: {error}") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise MissingError(f"the management library: {error}") from error

    def driver(self) -> str:
        return _text(self._nvml.nvmlSystemGetDriverVersion())

    def cuda(self) -> str:
        version = int(self._nvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{version // 1000}.{version % 1000 // 10}"

    def devices(self) -> list[dict[str, Any]]:
        found = []
        for handle in self._handles():
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                {
                    "uuid": _text(self._nvml.nvmlDeviceGetUUID(handle)),
                    "name": _text(self._nvml.nvmlDeviceGetName(handle)),
                    "total": int(memory.total),
                    "free": int(memory.free),
                }
            )
        return found

    def held(self, pid: int) -> dict[str, int]:
        held: dict[str, int] = {}
        for handle in self._handles():
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == pid:
                    uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
                    held[uuid] = int(process.usedGpuMemory or 0)
        return held

    def _handles(self) -> list[Any]:
        count = self._nvml.nvmlDeviceGetCount()
        return [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Worker:
    """Answers requests. Ways are opened when they are first needed."""

    def __init__(self) -> None:
        self._way: Way | None = None
        self._nvml: Nvml | None = None

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Raises `MissingError`, or whatever the driver's libraries raise."""
        pid, what = int(request.get("pid", 0)), request["do"]
        match what:
            case "facts":
                return self._facts()
            case "free":
                return {d["uuid"]: d["free"] for d in self._memory().devices()}
            case "held":
                return self._memory().held(pid)
            case "state":
                return self._driver().state(pid)
            case "lock":
                return self._driver().lock(pid, int(request["timeout_ms"]))
            case "checkpoint":
                return self._driver().checkpoint(pid)
            case "restore":
                return self._driver().restore(pid, request["device_map"])
            case "unlock":
                return self._driver().unlock(pid)
        raise ValueError(f"unknown request {what!r}")

    def _facts(self) -> dict[str, Any]:
        memory = self._memory()
        driver = memory.driver()
        major = int(driver.split(".")[0])
        why_not = None
        try:
            way = type(self._driver()).__name__
        except MissingError as error:
            way, why_not = "none", str(error)
        if major < OLDEST_DRIVER:
            why_not = f"driver {driver} cannot save processes; {OLDEST_DRIVER} or newer can"
        return {
            "driver": f"{driver}, CUDA {memory.cuda()}",
            "way": way,
            "devices": memory.devices(),
            "can_map": major >= OLDEST_MAPPING_DRIVER,
            "why_not": why_not,
        }

    def _memory(self) -> Nvml:
        if self._nvml is None:
            self._nvml = Nvml()
        return self._nvml

    def _driver(self) -> Way:
        if self._way is None:
            try:
                self._way = CudaCore()
            except MissingError:
                self._way = CudaCheckpoint()
        return self._way


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"ok": worker.answer(json.loads(line))}
        except MissingError as error:
            answer = {"error": str(error), "kind": "missing"}
        except Exception as error:  # noqa: BLE001 - whatever the driver's libraries raise
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "call"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
