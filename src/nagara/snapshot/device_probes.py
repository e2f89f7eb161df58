"""Asks NVIDIA's libraries about this machine, each in a process of its own with a time limit.

A driver that hangs or crashes then takes nothing along, and this process stays free of the
driver's state. Blocking: a second where there is a driver, milliseconds where there is none.
"""

import subprocess
import sys

from nagara.base.errors import NagaraError

_TIME_LIMIT_S = 30.0
# Each prints one line on success, or ends with a message. See the CUDA driver API and NVML's.
_CUDA = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("libcuda.so.1 is not installed")
if code := cuda.cuInit(0):
    sys.exit(f"cuInit fails with {code}")
version, count = ctypes.c_int(), ctypes.c_int()
for call, held in ((cuda.cuDriverGetVersion, version), (cuda.cuDeviceGetCount, count)):
    if code := call(ctypes.byref(held)):
        sys.exit(f"{call.__name__} fails with {code}")
if not count.value:
    sys.exit("the driver sees no device")
print(f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} device(s)")
"""
_NVML = """
import ctypes, sys
try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
except OSError:
    sys.exit("libnvidia-ml.so.1 is not installed")
if code := nvml.nvmlInit_v2():
    sys.exit(f"nvmlInit_v2 fails with {code}")
name = ctypes.create_string_buffer(96)
if code := nvml.nvmlSystemGetDriverVersion(name, len(name)):
    sys.exit(f"nvmlSystemGetDriverVersion fails with {code}")
print(f"driver {name.value.decode()}")
"""


class DeviceProbeError(NagaraError):
    """There is no such device here, or its driver does not answer."""


def try_cuda() -> str:
    """The CUDA driver initialised, its version and number of devices."""
    return _asked(_CUDA)


def try_nvml() -> str:
    """NVIDIA's management library initialised, and the driver's version."""
    return _asked(_NVML)


def _asked(program: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceProbeError(f"the driver does not answer in {_TIME_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise DeviceProbeError(said[-1] if said else f"ended with {done.returncode}")
    return done.stdout.strip()
