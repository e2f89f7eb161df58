"""What is asked of a device by those who save and restore replicas. No behaviour.

There are three: `cuda` (NVIDIA's driver), `cpu` (nothing of a replica is on a device: compiled
code and warmed state are in host memory and go along with it) and `simulated`.

Every call that changes something has a time limit and keeps it, whatever the driver does: it
returns, or raises one of the room's device errors. Blocking: worker threads only.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from nagara.snapshot.states import DeviceState


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The devices of this machine and what their driver can do.

    `memory_bytes`: uuid → size. The uuids are all that the driver sees, whatever a process is
    shown: a restore to another device has to map every one of them.
    """

    kind: str  # "cuda", "cpu", "simulated"
    driver: str
    memory_bytes: Mapping[str, int]
    can_save: bool
    can_map: bool = False  # restores to a device with another uuid
    why_not: str | None = None  # None: it can do all of it
    names: Mapping[str, str] | None = None  # uuid → model; None: not asked
    way: str = ""  # how the driver is reached, where there is a choice

    @property
    def uuids(self) -> tuple[str, ...]:
        """In the driver's order."""
        return tuple(self.memory_bytes)


class Device(Protocol):
    """The devices of one machine, through one driver.

    Processes are named by the pids that this machine knows them by.
    """

    kind: str

    def facts(self) -> DeviceFacts:
        """Raises `DeviceMissingError` when there is none, or the driver does not answer."""
        ...

    def holders(self, pids: Collection[int]) -> tuple[int, ...]:
        """Those of the processes that the driver knows, checkpointed ones included."""
        ...

    def state(self, pid: int) -> DeviceState:
        """Raises `DeviceGoneError`."""
        ...

    def held_bytes(self, pid: int) -> Mapping[str, int]:
        """What the process holds now: uuid → bytes. A checkpointed one holds nothing."""
        ...

    def kept_bytes(self, pid: int) -> int:
        """Host memory of the process. A checkpoint makes it grow by what was on the device."""
        ...

    def free_bytes(self) -> Mapping[str, int]:
        """What is free now: uuid → bytes."""
        ...

    def lock(self, pid: int, *, time_limit_s: float) -> None:
        """RUNNING → LOCKED. Raises `DeviceBusyError` with the process RUNNING as before."""
        ...

    def checkpoint(self, pid: int, *, time_limit_s: float) -> None:
        """LOCKED → CHECKPOINTED. Raises `DeviceLostError`."""
        ...

    def restore(self, pid: int, device_map: Mapping[str, str], *, time_limit_s: float) -> None:
        """CHECKPOINTED → LOCKED. Raises `DeviceLostError`.

        `device_map`: uuid at the checkpoint → uuid here, for all devices; empty: the same ones.
        """
        ...

    def unlock(self, pid: int, *, time_limit_s: float) -> None:
        """LOCKED → RUNNING. Raises `DeviceLostError`."""
        ...
