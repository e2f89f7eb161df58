"""A management library of devices that are whatever a test says they are."""

from dataclasses import replace
from typing import Any

from nagara.pool.health.nvidia import DeviceState
from nagara.pool.health.round import UnhealthyError

HEALTHY = DeviceState(
    uuid="GPU-0", name="NVIDIA H100 80GB HBM3", memory_total_bytes=85_000_000_000,
    memory_used_bytes=0, temperature_c=35, throttle_reasons=0, ecc_uncorrected=0,
    remap_pending=False, remap_failed=False, sm_clock_mhz=1980, max_sm_clock_mhz=1980,
)  # fmt: skip


class FakeNvml:
    """An `Nvml` without a driver."""

    def __init__(self, count: int = 8, version: str = "570.86.15") -> None:
        self.states = [replace(HEALTHY, uuid=f"GPU-{number}") for number in range(count)]
        self.version = version
        self.lost = ""  # not empty: a device has fallen off the bus

    def change(self, number: int, **changes: Any) -> None:
        """Something happens to one device."""
        self.states[number] = replace(self.states[number], **changes)

    def driver_version(self) -> str:
        """As given."""
        return self.version

    def devices(self) -> list[DeviceState]:
        """As given, unless one was lost."""
        if self.lost:
            raise UnhealthyError(self.lost)
        return list(self.states)
