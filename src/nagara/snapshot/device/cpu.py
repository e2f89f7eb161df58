"""The device of replicas that have none: nothing is held, so nothing is saved.

What a GPU replica has on its device, compiled code and warmed state, a CPU replica has in its
host memory. Their orders are the same; here they find no process.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from nagara.snapshot.device.errors import DeviceGoneError, DeviceRefusedError
from nagara.snapshot.device.protocol import DeviceFacts
from nagara.snapshot.states import DeviceState


class CpuDevice:
    """No device."""

    kind = "cpu"

    def facts(self) -> DeviceFacts:
        return DeviceFacts(self.kind, "none", {}, can_save=True, can_map=True)

    def holders(self, pids: Collection[int]) -> tuple[int, ...]:
        return ()

    def state(self, pid: int) -> DeviceState:
        if not Path(f"/proc/{pid}").exists():
            raise DeviceGoneError("has ended", where=f"process {pid}")
        return DeviceState.RUNNING

    def held_bytes(self, pid: int) -> Mapping[str, int]:
        return {}

    def kept_bytes(self, pid: int) -> int:
        return resident_bytes(pid)

    def free_bytes(self) -> Mapping[str, int]:
        return {}

    def lock(self, pid: int, *, time_limit_s: float) -> None:
        self._refuse(pid)

    def checkpoint(self, pid: int, *, time_limit_s: float) -> None:
        self._refuse(pid)

    def restore(self, pid: int, device_map: Mapping[str, str], *, time_limit_s: float) -> None:
        self._refuse(pid)

    def unlock(self, pid: int, *, time_limit_s: float) -> None:
        self._refuse(pid)

    def _refuse(self, pid: int) -> None:
        self.state(pid)
        raise DeviceRefusedError("holds no device", where=f"process {pid}")


def resident_bytes(pid: int) -> int:
    """Host memory of a process that is its own. Raises `DeviceGoneError`."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise DeviceGoneError("has ended", where=f"process {pid}") from None
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    # One that has ended and is not yet waited for has no memory any more.
    return sum(int(lines.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
