"""Real checks of a machine without regard to devices: memory, disk, clocks, kernel abilities.

Each blocks for up to a few seconds and raises `UnhealthyError` or `CannotRunError`.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from nagara.pool.health.round import CannotRunError, HealthCheck, UnhealthyError

_MIB = 2**20
MEMORY_MIB, DISK_MIB = 64, 64
LEAST_DISK_MB_S = 20.0
LEAST_FREE_SHARE = 0.05
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)


def checks(folder: Path, *, memory_mib: int = MEMORY_MIB) -> tuple[HealthCheck, ...]:
    """The boot checks of every machine. `folder` is on the disk that replicas will use."""
    return (
        HealthCheck("memory", lambda: memory(memory_mib), 20.0),
        HealthCheck("memory headroom", memory_headroom, 5.0),
        HealthCheck("disk", lambda: disk(folder), 30.0),
        HealthCheck("disk headroom", lambda: disk_headroom(folder), 5.0),
        HealthCheck("clock", clock, 5.0),
        HealthCheck("control groups", control_groups, 5.0),
        HealthCheck("mounts", mounts, 10.0),
    )


REQUIRED = frozenset({"memory", "disk", "clock"})


def memory(size_mib: int) -> str:
    """Writes patterns and addresses to memory and reads them back."""
    size = size_mib * _MIB
    try:
        block = bytearray(size)
    except MemoryError as error:
        raise CannotRunError(f"no {size_mib} MiB of memory to be had") from error
    view = memoryview(block)
    for pattern in _PATTERNS:
        expected = bytes([pattern]) * _MIB
        for at in range(0, size, _MIB):
            view[at : at + _MIB] = expected
        for at in range(0, size, _MIB):
            if view[at : at + _MIB] != expected:
                raise UnhealthyError(f"pattern {pattern:#04x} did not come back at {at:#x}")
    words = view.cast("Q")
    for at in range(0, len(words), 4096 // 8):  # one word a page holds its own address
        words[at] = at
    for at in range(0, len(words), 4096 // 8):
        if words[at] != at:
            raise UnhealthyError(f"page {at * 8:#x} holds another page's address")
    return f"{size_mib} MiB, {len(_PATTERNS)} patterns and addresses"


def memory_headroom() -> str:
    """Free memory must be more than a little."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0])
    share = values["MemAvailable"] / values["MemTotal"]
    if share < LEAST_FREE_SHARE:
        raise UnhealthyError(f"only {100 * share:.1f} % of memory is available")
    return f"{100 * share:.0f} % available"


def disk(folder: Path) -> str:
    """Writes, syncs and reads back; the rate must be that of a disk, not of a broken one."""
    at = _existing(folder)
    chunk = os.urandom(_MIB)
    if shutil.disk_usage(at).free < 2 * DISK_MIB * _MIB:
        raise CannotRunError(f"no room for {DISK_MIB} MiB in {at}")
    with tempfile.TemporaryFile(dir=at) as file:
        begun_s = time.monotonic()
        for _ in range(DISK_MIB):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        rate_mb_s = DISK_MIB * _MIB / 1e6 / max(time.monotonic() - begun_s, 1e-9)
        # Dropped from the page cache, so that the disk itself answers.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        for number in range(DISK_MIB):
            if file.read(_MIB) != chunk:
                raise UnhealthyError(f"block {number} did not come back from {at}")
    if rate_mb_s < LEAST_DISK_MB_S:
        raise UnhealthyError(f"writes {rate_mb_s:.1f} MB/s, less than {LEAST_DISK_MB_S:g}")
    return f"writes {rate_mb_s:.0f} MB/s"


def disk_headroom(folder: Path) -> str:
    """Free space and inodes must be more than a little."""
    found = os.statvfs(_existing(folder))
    share = found.f_bavail / max(1, found.f_blocks)
    inodes = found.f_favail / found.f_files if found.f_files else 1.0
    if min(share, inodes) < LEAST_FREE_SHARE:
        raise UnhealthyError(f"{100 * share:.1f} % of space, {100 * inodes:.1f} % of inodes free")
    return f"{100 * share:.0f} % free"


def clock() -> str:
    """Clocks run, none back, at one pace; the wall clock is somewhere in the present."""
    before = _clocks()
    time.sleep(0.2)
    after = _clocks()
    passed = [late - early for early, late in zip(before, after, strict=True)]
    if min(passed[:2]) < 0.15 or max(passed[:2]) > 2.0:
        raise UnhealthyError(f"0.2 s were {passed[0]:.3f} s and {passed[1]:.3f} s")
    if abs(passed[0] - passed[1]) > 0.05:
        raise UnhealthyError("monotonic and boot-time clock do not go at one pace")
    if after[2] < 1_735_689_600:  # 2025
        raise UnhealthyError("the wall clock is set to the past")
    return f"0.2 s were {passed[0]:.4f} s"


def _clocks() -> tuple[float, float, float]:
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()


def control_groups() -> str:
    """A control group can be made and removed (version 2)."""
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.controllers").exists():
        raise CannotRunError("no control groups of version 2")
    if os.geteuid() != 0:
        raise CannotRunError("needs root")
    group = root / f"nagara-check-{os.getpid()}"
    try:
        group.mkdir()
        has_events = (group / "cgroup.events").exists()
        group.rmdir()
    except OSError as error:
        raise CannotRunError(f"{group}: {error.strerror}") from error
    if not has_events:
        raise UnhealthyError("a new control group has no files")
    return "made and removed one"


def mounts() -> str:
    """A mount in a namespace of its own works and leaves nothing behind."""
    if os.geteuid() != 0:
        raise CannotRunError("needs root")
    unshare = shutil.which("unshare")
    if unshare is None:
        raise CannotRunError("no program `unshare`")
    script = 'mount -t tmpfs none "$1" && echo x > "$1/x" && test -s "$1/x"'
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [unshare, "--mount", "sh", "-c", script, "sh", folder],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
        if done.returncode != 0:
            raise CannotRunError(done.stderr.strip() or "cannot mount")
        if list(Path(folder).iterdir()):
            raise UnhealthyError("a mount in a namespace of its own is seen outside")
    return "a tmpfs in a namespace of its own"


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())
