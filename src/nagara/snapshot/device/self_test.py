"""Does saving and restoring work on this machine's devices? A small process goes out and back.

It fills some device memory with numbers, is taken off its device and put back by the same orders
as replicas are, and must find its numbers. Nothing else on the machine is touched. Blocking, for
some seconds; ends its process whatever happens.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nagara.snapshot.device.errors import DeviceMissingError
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.device.protocol import Device
from nagara.snapshot.device.simulated import SimulatedDevice
from nagara.snapshot.errors import SnapshotError

HELD_BYTES = 1 << 30
_START_S = 60.0
# CUDA driver API; the numbers are 32-bit, the i-th one is i.
_HOLDER = """
import ctypes, sys
size = int(sys.argv[1])
cuda = ctypes.CDLL("libcuda.so.1")
context, device, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} fails with {code}")
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
numbers = (ctypes.c_uint32 * (1 << 20))(*range(1 << 20))
piece = ctypes.sizeof(numbers)
def places():
    return (ctypes.c_void_p(memory.value + at) for at in range(0, size // piece * piece, piece))
for place in places():
    call("cuMemcpyHtoD_v2", place, numbers, ctypes.c_size_t(piece))
print("held", flush=True)
sys.stdin.readline()
found = (ctypes.c_uint32 * (1 << 20))()
for place in places():
    call("cuMemcpyDtoH_v2", found, place, ctypes.c_size_t(piece))
    if bytes(found) != bytes(numbers):
        sys.exit("the memory has other content than before")
print("same", flush=True)
"""


class DeviceTestError(SnapshotError):
    """The process did not go out and come back as it was."""


@dataclass(frozen=True, slots=True)
class DeviceTest:
    """How it went where it went well."""

    held_bytes: int
    saved_in_s: float
    restored_in_s: float


def self_test(device: Device, *, held_bytes: int = HELD_BYTES) -> DeviceTest:
    """Takes a process with `held_bytes` on the device out and back.

    Raises:
        SnapshotError: with the reason.
    """
    if isinstance(device, SimulatedDevice):
        return _simulated(device, held_bytes)
    facts = device.facts()
    if not facts.uuids:
        raise DeviceMissingError("has nothing on a device that could be saved", where=device.kind)
    with _holder(held_bytes) as process:
        tested = _out_and_back(device, DeviceOrders(device), process.pid, time.monotonic)
        _say(process, "check", "same")
    return tested


def _out_and_back(
    device: Device, orders: DeviceOrders, pid: int, clock_s: Callable[[], float]
) -> DeviceTest:
    began_s = clock_s()
    record = orders.save({pid: 1})
    saved_s = clock_s()
    if record is None:
        raise DeviceTestError("the driver does not know the process that uses it")
    orders.put_back(record, {1: pid})
    held = sum(record.processes[0].held_bytes.values())
    return DeviceTest(held, saved_s - began_s, clock_s() - saved_s)


def _simulated(device: SimulatedDevice, held_bytes: int) -> DeviceTest:
    clock, pid = device.clock, 1 << 30
    device.start(pid, {device.facts().uuids[0]: held_bytes})
    orders = DeviceOrders(device, monotonic_s=clock.monotonic_s, sleep=clock.spend)
    try:
        tested = _out_and_back(device, orders, pid, clock.monotonic_s)
        device.submit(pid, 0.0)
    finally:
        device.end(pid)
    return tested


@contextlib.contextmanager
def _holder(held_bytes: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-I", "-S", "-c", _HOLDER, str(held_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            _say(process, None, "held")
            yield process
        finally:
            process.kill()


def _say(process: "subprocess.Popen[str]", word: str | None, expected: str) -> None:
    """Waits for the process to say `expected`, after it was told `word`."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        if word is not None:
            process.stdin.write(word + "\n")
            process.stdin.flush()
    if process.stdout.readline().strip() != expected:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_START_S)
        process.kill()
        said = process.stderr.read().strip().splitlines()
        raise DeviceTestError(said[-1] if said else "the process that uses the device has ended")
