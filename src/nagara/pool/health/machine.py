"""This machine's checks put together: what it has decides which are run."""

from pathlib import Path

from nagara.contract.machine import CheckKind, HealthReport
from nagara.pool.health import cpu, cuda, kernellog, nvidia
from nagara.pool.health.monitor import Monitor
from nagara.pool.health.round import CannotRunError, HealthCheck, run_round
from nagara.pool.health.xid import XidPolicy

_BURN_MIB = 1024  # of memory, in the heavy round


def required(*, has_devices: bool) -> frozenset[str]:
    """Checks without which nothing is known of such a machine."""
    return cpu.REQUIRED | nvidia.REQUIRED if has_devices else cpu.REQUIRED


def checks_of(kind: CheckKind, folder: Path) -> tuple[HealthCheck, ...]:
    """The checks of one round. Devices are looked at if there are any; the pool misses others."""
    memory_mib = _BURN_MIB if kind is CheckKind.HEAVY else cpu.MEMORY_MIB
    chosen = [
        *cpu.checks(folder, memory_mib=memory_mib),
        kernellog.check(kernellog.KernelLog(), XidPolicy(), kind),
    ]
    if _has_devices():
        chosen += [*_device_checks(), cuda.check(), cuda.bandwidth_check()]
        if kind is not CheckKind.BOOT:
            chosen.append(nvidia.dcgm_check(kind))
    return tuple(chosen)


def _has_devices() -> bool:
    return Path("/dev/nvidiactl").exists()


def monitor_of(folder: Path) -> Monitor:
    """The monitor of this machine. `folder` is on the disk that replicas use."""
    quick = [
        HealthCheck("memory headroom", cpu.memory_headroom),
        HealthCheck("disk headroom", lambda: cpu.disk_headroom(folder)),
    ]
    if _has_devices():
        quick += _device_checks()
    return Monitor(kernellog.KernelLog(), lambda: tuple(quick))


def _device_checks() -> tuple[HealthCheck, ...]:
    try:
        return nvidia.checks(nvidia.RealNvml())
    except CannotRunError as error:
        why = str(error)

        def missing() -> str:
            raise CannotRunError(why)

        return tuple(HealthCheck(name, missing) for name in sorted(nvidia.REQUIRED))


async def check_machine(kind: CheckKind, folder: Path) -> HealthReport:
    """Looks at this machine. `folder` is on the disk that replicas use."""
    return await run_round(kind, checks_of(kind, folder))
