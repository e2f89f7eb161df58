import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    HealthReport,
    Outcome,
)
from nagara.pool.health import cpu, cuda, kernellog, nvidia
from nagara.pool.health import round as round_
from nagara.pool.health.care import Care
from nagara.pool.health.kinds import unexpected
from nagara.pool.health.machine import check_machine, required
from nagara.pool.health.monitor import Monitor
from nagara.pool.health.round import (
    CannotRunError,
    HealthCheck,
    UnhealthyError,
    result_of,
    run_round,
)
from nagara.pool.health.verdict import failure
from nagara.pool.health.xid import Action, XidPolicy, find_xids
from nagara.testing.fake_nvml import FakeNvml
from nagara.testing.pools import a_core, an_offering, make_ready

# -- verdicts: a check that did not run is no pass -------------------------------------------


def report(**outcomes: Outcome) -> HealthReport:
    return HealthReport(
        CheckKind.BOOT, tuple(CheckResult(name, one, "why") for name, one in outcomes.items())
    )


def test_what_did_not_run_is_no_pass_where_it_is_required() -> None:
    seen = report(disk=Outcome.PASS, devices=Outcome.DID_NOT_RUN)
    assert failure(seen, frozenset({"disk"})) is None
    assert failure(seen, frozenset({"devices"})) == "devices did not run: why"
    assert failure(seen, frozenset({"memory"})) == "memory did not run: no result"


def test_one_failure_is_enough_whatever_is_required() -> None:
    assert failure(report(disk=Outcome.PASS, clock=Outcome.FAIL), frozenset()) == "clock: why"


# -- rounds ----------------------------------------------------------------------------------


async def test_checks_that_hang_or_cannot_run_do_not_stop_the_others() -> None:
    gate = threading.Event()

    def hangs() -> str:
        gate.wait(20)
        return "late"

    def cannot() -> str:
        raise CannotRunError("no such thing here")

    def unreadable() -> str:
        raise PermissionError("not allowed")

    def bad() -> str:
        raise UnhealthyError("broken")

    def breaks() -> str:
        raise ValueError("a line that nobody expected")

    checks = [
        HealthCheck("hangs", hangs, 0.05), HealthCheck("cannot", cannot),
        HealthCheck("unreadable", unreadable), HealthCheck("breaks", breaks),
        HealthCheck("bad", bad), HealthCheck("good", lambda: "fine"),
    ]  # fmt: skip
    done = await run_round(CheckKind.BOOT, checks)
    gate.set()
    assert [one.outcome for one in done.results] == [
        Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.DID_NOT_RUN, Outcome.DID_NOT_RUN,
        Outcome.FAIL, Outcome.PASS,
    ]  # fmt: skip
    assert "hung" in done.results[0].detail
    assert "nobody expected" in done.results[3].detail
    monitor = Monitor(kernellog.KernelLog("/nowhere"), lambda: tuple(checks[1:]))
    monitor.round()
    assert [one.outcome for one in monitor.take().results[:5]] == [
        one.outcome for one in done.results[1:]
    ]


async def test_a_boot_round_ends_in_time_however_many_of_its_checks_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    checks = [HealthCheck(f"hangs {n}", lambda: str(gate.wait(20))) for n in range(5)]
    monkeypatch.setattr(round_, "BOOT_LIMIT_S", 0.1)
    done = await run_round(CheckKind.BOOT, checks)
    gate.set()
    outcomes = [one.outcome for one in done.results]
    assert outcomes == [Outcome.FAIL, *4 * [Outcome.DID_NOT_RUN]]
    assert "round's 0.1 s" in done.results[-1].detail


def test_a_process_can_end_while_a_check_of_it_hangs() -> None:
    code = (
        "import asyncio, time\n"
        "from nagara.contract.machine import CheckKind\n"
        "from nagara.pool.health.round import HealthCheck, run_round\n"
        "hangs = HealthCheck('hangs', lambda: str(time.sleep(3600)), 0.05)\n"
        "print(asyncio.run(run_round(CheckKind.BOOT, [hangs])).results[0].outcome)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("fail", 0)


async def test_thorough_rounds_take_as_long_as_their_checks_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_, "BOOT_LIMIT_S", 0.0)
    check = HealthCheck("long", lambda: "done", 20.0)
    for kind, outcome in ((CheckKind.MEDIUM, Outcome.PASS), (CheckKind.BOOT, Outcome.DID_NOT_RUN)):
        (result,) = (await run_round(kind, [check])).results
        assert result.outcome is outcome


# -- this machine, really --------------------------------------------------------------------


async def test_this_machine_passes_its_own_boot_checks(tmp_path: Path) -> None:
    done = await check_machine(CheckKind.BOOT, tmp_path)
    # Space on a test machine's disk is not what is tested here.
    results = tuple(one for one in done.results if "headroom" not in one.name)
    assert failure(HealthReport(done.kind, results), required(has_devices=False)) is None


def test_memory_is_written_and_read_back() -> None:
    assert "4 patterns" in cpu.memory(2)


def test_a_disk_that_is_too_slow_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LEAST_DISK_MB_S", 1e9)
    monkeypatch.setattr(cpu, "DISK_MIB", 1)
    with pytest.raises(UnhealthyError, match="MB/s"):
        cpu.disk(tmp_path)


def test_clocks_that_do_not_agree_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(0.0, 0.0, 2e9), (0.2, 0.9, 2e9)])
    monkeypatch.setattr(cpu, "_clocks", lambda: next(readings))
    with pytest.raises(UnhealthyError, match="one pace"):
        cpu.clock()


def test_a_wall_clock_of_the_past_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(0.0, 0.0, 0.0), (0.2, 0.2, 0.2)])
    monkeypatch.setattr(cpu, "_clocks", lambda: next(readings))
    with pytest.raises(UnhealthyError, match="past"):
        cpu.clock()


# -- devices ---------------------------------------------------------------------------------

OFFERED = an_offering(devices=8, type="H100-80GB")


async def outcomes(nvml: FakeNvml) -> dict[str, str]:
    done = await run_round(CheckKind.BOOT, nvidia.checks(nvml))
    return {one.name: f"{one.outcome}: {one.detail}" for one in done.results}


async def test_healthy_devices_pass() -> None:
    seen = await outcomes(FakeNvml())
    assert all(text.startswith("pass") for text in seen.values()), seen


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        ({"ecc_uncorrected": 2}, "device memory errors", "2 uncorrected"),
        ({"remap_pending": True}, "device memory errors", "waits for a reset"),
        ({"remap_failed": True}, "device memory errors", "remapping a memory row failed"),
        ({"throttle_reasons": 0x40}, "temperature and throttling", "thermal slow-down"),
        ({"temperature_c": 95}, "temperature and throttling", "95 °C"),
        ({"sm_clock_mhz": 210}, "clocks", "210 of 1980 MHz"),
    ],
)
async def test_a_fault_of_one_device_is_found(
    changes: dict[str, object], check: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "CLOCK_PAUSE_S", 0.0)
    nvml = FakeNvml()
    nvml.change(5, **changes)
    seen = await outcomes(nvml)
    assert seen[check].startswith("fail")
    assert text in seen[check]


async def test_an_idle_device_may_be_slow_and_one_that_speeds_up_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml(2)
    nvml.change(0, sm_clock_mhz=210, throttle_reasons=1)
    nvml.change(1, sm_clock_mhz=210)
    monkeypatch.setattr(nvidia.time, "sleep", lambda _: nvml.change(1, sm_clock_mhz=1900))
    assert (await outcomes(nvml))["clocks"].startswith("pass")


@pytest.mark.parametrize(
    ("count", "name", "why"),
    [
        (8, "NVIDIA H100 80GB HBM3", None),
        (9, "NVIDIA H100 80GB HBM3", None),
        (7, "NVIDIA H100 80GB HBM3", "expected 8"),
        (8, "NVIDIA H1000", "expected H100-80GB"),
        (8, "NVIDIA A100-SXM4-80GB", "expected H100-80GB"),
    ],
)
async def test_devices_must_be_those_that_were_offered(
    count: int, name: str, why: str | None
) -> None:
    nvml = FakeNvml(count)
    nvml.change(0, name=name)
    report = await run_round(CheckKind.BOOT, nvidia.checks(nvml))
    assert failure(report, nvidia.REQUIRED) is None
    found = unexpected(report, OFFERED)
    assert (found is None) if why is None else (why in str(found))
    assert unexpected(report, an_offering(devices=99, type="cpu")) is None
    assert unexpected(report, an_offering(devices=2, type="our-box")) is None


def bandwidth(gb_s: float) -> HealthReport:
    result = CheckResult(cuda.BANDWIDTH, Outcome.PASS, f"{gb_s} GB/s", figure=gb_s)
    return HealthReport(CheckKind.BOOT, (result,))


def test_a_machine_must_not_be_slower_than_others_of_its_kind() -> None:
    care, core = Care(), a_core()
    names = [make_ready(core, an_offering("a", type="h100")) for _ in range(5)]
    machines = [core.table.named(name) for name in names]
    none: frozenset[str] = frozenset()
    for machine, rate in zip(machines[:3], (55.0, 54.0, 20.0), strict=True):
        assert care.judge(machine, bandwidth(rate), none) is None  # nothing to compare with
    assert "less than 90 %" in str(care.judge(machines[3], bandwidth(48.0), none))
    assert care.judge(machines[3], bandwidth(49.0), none) is None
    other = core.table.named(make_ready(core, an_offering("b", type="l4")))
    assert care.judge(other, bandwidth(12.0), none) is None
    assert "less than 90 %" in str(care.judge(machines[2], bandwidth(20.0), none))


async def test_lost_devices_are_found() -> None:
    lost = FakeNvml()
    lost.lost = "a device does not answer: GPU is lost"
    assert all(
        text.startswith("fail") for name, text in (await outcomes(lost)).items() if name != "driver"
    )


async def test_devices_that_do_not_count_errors_say_nothing_of_them() -> None:
    nvml = FakeNvml(1)
    nvml.change(0, ecc_uncorrected=None, remap_failed=None, remap_pending=None)
    seen = await outcomes(nvml)
    assert seen["device memory errors"].startswith("did not run")


def dcgm(status: str, key: str = "DCGM Diagnostic") -> str:
    tests = [
        {"name": "Memory", "results": [{"status": status, "warnings": "row 3"}]},
        {"name": "PCIe", "results": [{"status": "Skip"}]},
    ]
    return "noise\n" + json.dumps({key: {"test_categories": [{"tests": tests}]}})


def test_diagnostics_are_read_as_what_they_say() -> None:
    assert nvidia.read_dcgm(dcgm("Pass")) == "1 passed, 1 did not run"
    assert nvidia.read_dcgm(dcgm("Pass", "DCGM GPU Diagnostic")) == "1 passed, 1 did not run"
    with pytest.raises(UnhealthyError, match="Memory: row 3"):
        nvidia.read_dcgm(dcgm("Fail"))
    with pytest.raises(CannotRunError, match="skipped"):
        nvidia.read_dcgm(dcgm("Skip"))
    for nonsense in ("", "Error: unable to connect", '{"a": 1}'):
        with pytest.raises(CannotRunError, match="no result"):
            nvidia.read_dcgm(nonsense)


# -- Xid -------------------------------------------------------------------------------------

LOG = [
    "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
    "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=77, Graphics SM Warp Exception",
    "6,1,2,-;usb 1-1: new device",
]


def test_xid_events_are_found_in_the_kernel_log() -> None:
    assert [(one.code, one.device) for one in find_xids(LOG)] == [
        (79, "0000:3b:00"), (13, "0000:3b:00"),
    ]  # fmt: skip


def test_the_table_names_its_source_and_every_action_is_known() -> None:
    policy = XidPolicy()
    assert policy.source.startswith("https://docs.nvidia.com/")
    assert policy.judge(79).action is Action.REMOVE
    assert policy.judge(13).action is Action.IGNORE
    worst = policy.worst(find_xids(LOG))
    assert worst is not None
    assert worst[0].code == 79


def test_a_code_nobody_knows_keeps_the_machine_from_new_leases() -> None:
    judgement = XidPolicy().judge(9999)
    assert (judgement.action, judgement.is_known) == (Action.KEEP_OUT, False)


def test_the_kernel_log_fails_a_machine_only_for_what_is_fatal(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    check = kernellog.check(kernellog.KernelLog(str(path)), XidPolicy())
    path.write_text(LOG[1] + "\n" + LOG[2] + "\n")
    assert "nothing fatal" in check.run()
    path.write_text("\n".join(LOG))
    with pytest.raises(UnhealthyError, match="Xid 79"):
        check.run()
    path.unlink()
    with pytest.raises(CannotRunError):
        check.run()


def test_the_event_that_asks_for_diagnostics_does_not_fail_them(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(LOG[0].replace(": 79,", ": 94,") + "\n" + LOG[0].replace(": 79,", ": 9999,"))
    log, policy = kernellog.KernelLog(str(path)), XidPolicy()
    with pytest.raises(UnhealthyError):
        kernellog.check(log, policy, CheckKind.BOOT).run()
    assert "nothing fatal" in kernellog.check(log, policy, CheckKind.MEDIUM).run()
    path.write_text(LOG[0])
    with pytest.raises(UnhealthyError, match="Xid 79"):
        kernellog.check(log, policy, CheckKind.MEDIUM).run()


# -- the probe of CUDA devices ---------------------------------------------------------------


class FakeCuda:
    """A driver whose devices compute, or do as a test says."""

    def __init__(self, devices: int = 2, failing: str = "", wrong: bool = False) -> None:
        self.count, self.failing, self.wrong, self.calls = devices, failing, wrong, []

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name == self.failing:
                return 719
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = self.count  # type: ignore[attr-defined]
            if name == "cuMemcpyDtoH_v2" and hasattr(arguments[0], "__len__"):
                for at in range(len(arguments[0])):  # type: ignore[arg-type]
                    arguments[0][at] = 0 if self.wrong else at  # type: ignore[index]
            return 0

        return call


def test_a_kernel_runs_on_every_device_and_everything_is_given_back() -> None:
    driver = FakeCuda(3)
    assert cuda.probe(driver) == 3
    for name in ("cuLaunchKernel", "cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"):
        assert driver.calls.count(name) == 3


def test_the_slowest_copy_of_any_device_is_what_counts() -> None:
    driver = FakeCuda(2)
    # Of eight copies a device, four to it and four from it, the best of each way.
    took_s = iter([9, 2, 2, 2, 9, 1, 1, 1, 9, 1, 1, 1, 9, 4, 9, 9])
    now_s, is_begin = 0.0, True

    def clock() -> float:
        nonlocal now_s, is_begin
        now_s += 0.0 if is_begin else next(took_s)
        is_begin = not is_begin
        return now_s

    assert cuda.measure(driver, clock) == pytest.approx((64 << 20) / 4 / 1e9)
    for name in ("cuMemFree_v2", "cuMemFreeHost", "cuDevicePrimaryCtxRelease_v2"):
        assert driver.calls.count(name) == 2
    with pytest.raises(cuda.DriverError, match="no device"):
        cuda.measure(FakeCuda(0))


def test_a_figure_that_was_measured_is_told_with_its_check() -> None:
    answer = (sys.executable, "-c", "print('{\"slowest_gb_s\": 52.125}')")
    result = result_of(cuda.bandwidth_check(answer))
    assert (result.outcome, result.figure) == (Outcome.PASS, 52.125)
    broken = (sys.executable, "-c", "print('{}')")
    assert result_of(cuda.bandwidth_check(broken)).outcome is Outcome.DID_NOT_RUN


@pytest.mark.parametrize("name", ["cuInit", "cuMemAlloc_v2", "cuLaunchKernel", "cuCtxSynchronize"])
def test_a_call_of_the_driver_that_fails_is_named(name: str) -> None:
    with pytest.raises(cuda.DriverError, match=f"{name} failed with 719"):
        cuda.probe(FakeCuda(failing=name))


def test_a_device_that_computes_wrongly_is_found() -> None:
    with pytest.raises(cuda.DriverError, match="computes wrongly"):
        cuda.probe(FakeCuda(wrong=True))


def test_a_probe_that_dies_hangs_or_finds_no_driver_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def python(code: str) -> tuple[str, ...]:
        return (sys.executable, "-c", code)

    assert "2 devices" in cuda.check(python("print('{\"devices\": 2}')")).run()
    with pytest.raises(UnhealthyError, match=r"ended with -6 \(3 tries\)"):
        cuda.check(python("import os; os.abort()")).run()
    with pytest.raises(CannotRunError):
        cuda.check(python("raise SystemExit(3)")).run()
    monkeypatch.setattr(cuda, "LIMIT_S", 0.2)
    with pytest.raises(UnhealthyError, match="hung"):
        cuda.check(python("import time; time.sleep(30)")).run()
