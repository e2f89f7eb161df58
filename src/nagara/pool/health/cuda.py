"""One context, one allocation and one kernel on every CUDA device, through the driver alone.

A driver may list a device that no program can use. The probe runs in a process of its own
(`python -m nagara.pool.health.cuda`): a driver that hangs, or takes its process down, costs the
probe and nothing else. With `--bandwidth` it measures how fast pinned memory is copied to every
device and back: a link that came up at half its width is found by nothing else.
"""

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from nagara.pool.health.round import CannotRunError, HealthCheck, Measured, UnhealthyError

TRIES, LIMIT_S = 3, 20.0
BANDWIDTH = "host-device bandwidth"  # the check's name
_COPY_BYTES, _COPIES = 64 << 20, 4
Call = Callable[..., None]
_COUNT, _BLOCK = 4096, 256
_NO_DRIVER = 3  # exit code
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry fill(.param .u64 where, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [where];
    ld.param.u32 %r5, [count];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r4;
DONE:
    ret;
}
\0"""


def check(command: tuple[str, ...] = (sys.executable, "-m", __name__)) -> HealthCheck:
    """The probe, tried a few times."""
    return HealthCheck("compute", lambda: _try(command), TRIES * LIMIT_S + 5)


def bandwidth_check(
    command: tuple[str, ...] = (sys.executable, "-m", __name__, "--bandwidth"),
) -> HealthCheck:
    """The slowest copy of any device, in GB/s. What is slow for its kind, the pool knows."""

    def run() -> Measured:
        slowest = float(_answer(command)["slowest_gb_s"])
        return Measured(f"at least {slowest:.1f} GB/s", slowest)

    return HealthCheck(BANDWIDTH, run, TRIES * LIMIT_S + 5)


def _try(command: tuple[str, ...]) -> str:
    return f"a kernel ran on each of {_answer(command)['devices']} devices"


def _answer(command: tuple[str, ...]) -> dict[str, Any]:
    fault = ""
    for _ in range(TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            fault = f"the probe hung for {LIMIT_S:g} s"
            continue
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        lines = done.stderr.strip().splitlines()
        fault = lines[-1] if lines else f"the probe ended with {done.returncode}"
        if done.returncode == _NO_DRIVER:
            raise CannotRunError(fault)
    raise UnhealthyError(f"{fault} ({TRIES} tries)")


class DriverError(Exception):
    """A call of the driver failed."""


def probe(cuda: Any) -> int:
    """Uses every device of the driver library `cuda` once; returns their number."""

    call = _caller(cuda)
    count = _count(call)
    for number in range(count):
        _use(call, number)
    return count


def measure(cuda: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """GB/s of the slowest copy between pinned memory and any device; at least one is needed."""
    call = _caller(cuda)
    count = _count(call)
    if count == 0:
        raise DriverError("no device")
    return min(_copy_rate(call, number, clock) for number in range(count)) / 1e9


def _caller(cuda: Any) -> Call:
    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            raise DriverError(f"{name} failed with {code}")

    return call


def _count(call: Call) -> int:
    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def _copy_rate(call: Call, number: int, clock: Callable[[], float]) -> float:
    """Bytes per second, the slower of both directions, each at its best of a few copies."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    here, there, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(_COPY_BYTES)
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        call("cuMemAllocHost_v2", ctypes.byref(here), size)
        call("cuMemAlloc_v2", ctypes.byref(there), size)
        best_s = []
        for copy, target, source in (
            ("cuMemcpyHtoD_v2", there, here), ("cuMemcpyDtoH_v2", here, there)
        ):  # fmt: skip
            times_s = []
            for _ in range(_COPIES):  # the first one also wakes the link up
                begun_s = clock()
                call(copy, target, source, size)
                call("cuCtxSynchronize")
                times_s.append(clock() - begun_s)
            best_s.append(min(times_s))
        call("cuMemFree_v2", there)
        call("cuMemFreeHost", here)
        return _COPY_BYTES / max(max(best_s), 1e-9)
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)


def _use(call: Call, number: int) -> None:
    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    kernel, where = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(where), ctypes.c_size_t(4 * _COUNT))
        call("cuModuleLoadData", ctypes.byref(module), _PTX)
        call("cuModuleGetFunction", ctypes.byref(kernel), module, b"fill")
        size = ctypes.c_uint32(_COUNT)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(size))
        blocks = _COUNT // _BLOCK
        call("cuLaunchKernel", kernel, blocks, 1, 1, _BLOCK, 1, 1, 0, None, arguments, None)
        call("cuCtxSynchronize")
        got = (ctypes.c_uint32 * _COUNT)()
        call("cuMemcpyDtoH_v2", got, where, ctypes.c_size_t(4 * _COUNT))
        if list(got) != list(range(_COUNT)):
            raise DriverError(f"device {number} computes wrongly")
        call("cuMemFree_v2", where)
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)


def main() -> int:
    """Probes and prints; the exit code tells a missing driver from a fault."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"no CUDA driver: {error}", file=sys.stderr)  # noqa: T201  # to the parent
        return _NO_DRIVER
    try:
        if "--bandwidth" in sys.argv[1:]:
            answer: dict[str, float] = {"slowest_gb_s": measure(cuda)}
        else:
            answer = {"devices": probe(cuda)}
    except DriverError as error:
        print(error, file=sys.stderr)  # noqa: T201  # to the parent
        return 1
    print(json.dumps(answer))  # noqa: T201  # to the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
