"""What of a host decides whether saved memory can run on it. The one place that reads it.

Libraries choose code by CPU features once, at start; their choice is in the saved memory. The
kernel's save area for the extended registers has the size it had at capture.
"""

import ctypes
import platform
from pathlib import Path

from nagara.snapshot.device.errors import DeviceError
from nagara.snapshot.device.protocol import Device
from nagara.snapshot.variant import HostFacts

_CPU = Path("/proc/cpuinfo")
_CACHE_LINE = Path("/sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size")
_COMMON_CACHE_LINE_BYTES = 64
_AT_MINSIGSTKSZ = 51  # see getauxval(3)


def read_host_facts(tools: tuple[str, ...], device: Device | None = None) -> HostFacts:
    """This host's facts.

    Args:
        tools: the versions found by whoever knows the tools.
        device: asked for its driver and models; None: there is none. May take some seconds.
    """
    return HostFacts(
        cpu_flags=_cpu_flags(_CPU.read_text()),
        signal_frame_bytes=_auxiliary_value(_AT_MINSIGSTKSZ),
        cache_line_bytes=_cache_line_bytes(),
        kernel_class=".".join(platform.release().split(".")[:2]),
        tools=tools,
        devices=() if device is None else _devices(device),
    )


def _devices(device: Device) -> tuple[str, ...]:
    """The driver and the kinds of devices, not how many; none where the driver does not answer."""
    try:
        facts = device.facts()
    except DeviceError:
        return ()
    if not facts.memory_bytes:
        return ()
    models = sorted(set((facts.names or {}).values()))
    return (f"{facts.kind} driver {facts.driver}", *models)


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The flags of the first CPU: `flags` on x86, `Features` on Arm."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _cache_line_bytes() -> int:
    try:
        return int(_CACHE_LINE.read_text())
    except (OSError, ValueError):  # virtual machines often do not say
        return _COMMON_CACHE_LINE_BYTES


def _auxiliary_value(key: int) -> int:
    """What the kernel told this process at its start; 0 when it does not give the key."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(getauxval(key))
