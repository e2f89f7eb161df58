"""Checks of NVIDIA devices through the management library, and through `dcgmi` when present.

`Nvml` is the little of it that is used; `nagara.testing.fake_nvml` is another one. The real one
is the package `nvidia-ml-py` over the driver's own library. Nothing here makes a CUDA context.
"""

import importlib
import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any, Protocol

from nagara.pool.health.round import CannotRunError, HealthCheck, Measured, UnhealthyError

HOT_C = 90
_THROTTLE_FAULTS = {
    0x0000000000000008: "hardware slow-down",
    0x0000000000000040: "hardware thermal slow-down",
    0x0000000000000080: "power brake",
}
_IDLE = 0x0000000000000001
LEAST_CLOCK_SHARE = 0.4  # below it a device with work is held back, a power limit or not
CLOCK_READINGS, CLOCK_PAUSE_S = 4, 0.5
DCGM_LEVEL = {"medium": 2, "heavy": 3}
_DCGM_LIMIT_S = {"medium": 300.0, "heavy": 4500.0}


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device as the management library sees it. None: the device does not say."""

    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    temperature_c: int | None
    throttle_reasons: int | None
    ecc_uncorrected: int | None  # since the driver was loaded
    remap_pending: bool | None
    remap_failed: bool | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None


class Nvml(Protocol):
    """What is asked of the management library."""

    def driver_version(self) -> str:
        """Raises `CannotRunError` when there is no driver."""
        ...

    def devices(self) -> list[DeviceState]:
        """All devices; raises `UnhealthyError` when one has been lost."""
        ...


def checks(nvml: Nvml) -> tuple[HealthCheck, ...]:
    """The boot checks of a machine with devices. How many it should have, the pool knows."""
    return (
        HealthCheck("devices", lambda: _devices(nvml), 20.0),
        HealthCheck("driver", nvml.driver_version, 10.0),
        HealthCheck("device memory errors", lambda: _memory_errors(nvml), 10.0),
        HealthCheck("temperature and throttling", lambda: _heat(nvml), 10.0),
        HealthCheck("clocks", lambda: _clocks(nvml), 10.0),
    )


REQUIRED = frozenset({"devices", "driver"})


def _devices(nvml: Nvml) -> Measured:
    found = nvml.devices()
    if not found:
        raise CannotRunError("no device")
    return Measured(f"{len(found)} x {found[0].name}", len(found))


def _clocks(nvml: Nvml) -> str:
    """A device that has work must not stay at a low clock. One that has none may."""
    low = _slow(nvml)
    for _ in range(CLOCK_READINGS - 1):
        if not low:
            return "as fast as they should be, or idle"
        time.sleep(CLOCK_PAUSE_S)  # it may just be speeding up
        low = {number: text for number, text in _slow(nvml).items() if number in low}
    if low:
        raise UnhealthyError("; ".join(low.values()))
    return "as fast as they should be, or idle"


def _slow(nvml: Nvml) -> dict[int, str]:
    return {
        number: f"device {number} runs at {one.sm_clock_mhz} of {one.max_sm_clock_mhz} MHz"
        for number, one in enumerate(nvml.devices())
        if one.sm_clock_mhz is not None
        and one.max_sm_clock_mhz is not None
        and not (one.throttle_reasons or 0) & _IDLE
        and one.sm_clock_mhz < LEAST_CLOCK_SHARE * one.max_sm_clock_mhz
    }


def _memory_errors(nvml: Nvml) -> str:
    silent = True
    for number, one in enumerate(nvml.devices()):
        if one.ecc_uncorrected:
            raise UnhealthyError(f"device {number}: {one.ecc_uncorrected} uncorrected errors")
        if one.remap_failed:
            raise UnhealthyError(f"device {number}: remapping a memory row failed")
        if one.remap_pending:
            raise UnhealthyError(f"device {number}: a memory row waits for a reset to be remapped")
        silent &= one.ecc_uncorrected is None and one.remap_failed is None
    if silent:
        raise CannotRunError("the devices do not count memory errors")
    return "none uncorrected, no row to remap"


def _heat(nvml: Nvml) -> str:
    hottest = 0
    for number, one in enumerate(nvml.devices()):
        for bit, reason in _THROTTLE_FAULTS.items():
            if one.throttle_reasons is not None and one.throttle_reasons & bit:
                raise UnhealthyError(f"device {number} is slowed down: {reason}")
        if one.temperature_c is not None:
            hottest = max(hottest, one.temperature_c)
    if hottest >= HOT_C:
        raise UnhealthyError(f"{hottest} °C")
    return f"at most {hottest} °C"


class RealNvml:
    """The driver's library through `nvidia-ml-py`. Made anew for every round."""

    def __init__(self) -> None:
        try:
            self._lib: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise CannotRunError("nvidia-ml-py is not installed") from error
        try:
            self._lib.nvmlInit()
        except self._lib.NVMLError as error:
            raise CannotRunError(f"no NVIDIA driver: {error}") from error

    def driver_version(self) -> str:
        """As the driver says."""
        return str(self._lib.nvmlSystemGetDriverVersion())

    def devices(self) -> list[DeviceState]:
        """All of them."""
        try:
            count = self._lib.nvmlDeviceGetCount()
            return [self._state(self._lib.nvmlDeviceGetHandleByIndex(n)) for n in range(count)]
        except self._lib.NVMLError as error:
            raise UnhealthyError(f"a device does not answer: {error}") from error

    def _state(self, handle: Any) -> DeviceState:
        lib = self._lib
        memory = lib.nvmlDeviceGetMemoryInfo(handle)
        remap = self._ask(lib.nvmlDeviceGetRemappedRows, handle)
        return DeviceState(
            uuid=str(lib.nvmlDeviceGetUUID(handle)),
            name=str(lib.nvmlDeviceGetName(handle)),
            memory_total_bytes=int(memory.total),
            memory_used_bytes=int(memory.used),
            temperature_c=self._ask(
                lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU
            ),
            throttle_reasons=self._ask(lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            ecc_uncorrected=self._ask(
                lib.nvmlDeviceGetTotalEccErrors, handle,
                lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC,
            ),
            remap_pending=None if remap is None else bool(remap[2]),
            remap_failed=None if remap is None else bool(remap[3]),
            sm_clock_mhz=self._ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM),
            max_sm_clock_mhz=self._ask(lib.nvmlDeviceGetMaxClockInfo, handle, lib.NVML_CLOCK_SM),
        )  # fmt: skip

    def _ask(self, function: Any, *arguments: Any) -> Any:
        """None where the device does not support the question; lost devices raise."""
        try:
            return function(*arguments)
        except self._lib.NVMLError_NotSupported:
            return None


def dcgm_check(kind: str, program: str = "dcgmi") -> HealthCheck:
    """`dcgmi diag`, medium or heavy."""
    return HealthCheck(f"dcgm {kind}", lambda: _run_dcgm(kind, program), _DCGM_LIMIT_S[kind] + 30)


def _run_dcgm(kind: str, program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise CannotRunError(f"no program `{program}`")
    try:
        done = subprocess.run(
            [found, "diag", "-r", str(DCGM_LEVEL[kind]), "-j"],
            capture_output=True, text=True, timeout=_DCGM_LIMIT_S[kind],
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UnhealthyError(f"diagnostics hung for {_DCGM_LIMIT_S[kind]:g} s") from error
    return read_dcgm(done.stdout)


def read_dcgm(output: str) -> str:
    """What `dcgmi diag -j` found: a detail, `UnhealthyError`, or `CannotRunError`.

    The exit code is not asked: it is 0 in some versions although a test failed. Only a test that
    says it passed has passed; one that was skipped says nothing.
    """
    try:
        document = json.loads(output[output.index("{") :])
        groups = document["DCGM GPU Diagnostic" if "DCGM GPU Diagnostic" in document
                          else "DCGM Diagnostic"]["test_categories"]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise CannotRunError(f"dcgmi gave no result: {output.strip()[:200]}") from error
    passed = skipped = 0
    for group in groups:
        for test in group.get("tests", ()):
            for result in test.get("results", ()):
                status = str(result.get("status", "")).lower()
                if status == "fail":
                    warnings = result.get("warnings") or result.get("info") or ""
                    raise UnhealthyError(f"{test.get('name')}: {str(warnings)[:300] or 'failed'}")
                passed += status in ("pass", "warn")
                skipped += status not in ("pass", "warn")
    if passed == 0:
        raise CannotRunError("every test was skipped")
    return f"{passed} passed, {skipped} did not run"
