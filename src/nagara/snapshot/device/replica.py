"""A container's device memory, saved before its host memory and put back after it.

What was on which device is noted beside the checkpoint tool's files, so that it is as much part
of the snapshot as they are. Where a replica had nothing on a device there is no note, and its
restore asks no driver. Blocking: worker threads only.
"""

from pathlib import Path

from nagara.snapshot.device.cpu import CpuDevice
from nagara.snapshot.device.cuda import CudaDevice
from nagara.snapshot.device.orders import DeviceOrders, DeviceRecord
from nagara.snapshot.device.protocol import Device
from nagara.snapshot.errors import BadSnapshotError
from nagara.snapshot.processes import processes_of

NOTE = "nagara-device.json"
_DRIVER = Path("/dev/nvidiactl")


def find_device() -> Device:
    """The devices of this machine, going by the driver's own file."""
    return CudaDevice() if _DRIVER.exists() else CpuDevice()


def save_device(
    orders: DeviceOrders, init_pid: int, memory: Path, *, rebuilds_communicators: bool
) -> None:
    """Takes the container off its devices and notes in `memory` what was there.

    Raises:
        CaptureError: with the reason; the container is to be ended.
    """
    pids = {pid: inside for pid in processes_of(init_pid) if (inside := pid_inside(pid))}
    record = orders.save(pids, rebuilds_communicators=rebuilds_communicators)
    if record is not None:
        (memory / NOTE).write_bytes(record.to_json())


def put_back_device(orders: DeviceOrders, init_pid: int, memory: Path) -> bool:
    """Puts back what was noted; False when there was nothing on a device.

    Raises:
        SnapshotError: by whose fault it is; the container is to be ended.
    """
    try:
        record = DeviceRecord.from_json((memory / NOTE).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadSnapshotError(f"cannot be read: {error!r}", where=NOTE) from error
    pids = {inside: pid for pid in processes_of(init_pid) if (inside := pid_inside(pid))}
    orders.put_back(record, pids)
    return True


def pid_inside(pid: int) -> int | None:
    """The pid that a process has in its own namespace; None when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    lines = (line.split() for line in status.splitlines())
    return next((int(line[-1]) for line in lines if line[:1] == ["NSpid:"]), None)
