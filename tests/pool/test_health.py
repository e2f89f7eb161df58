import json
import sys
import threading
from pathlib import Path

import pytest

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    DeviceEvent,
    HealthReport,
    Outcome,
    Vitals,
)
from nagara.pool.actions import Check
from nagara.pool.core import PoolCore
from nagara.pool.health import cpu, cuda, kernellog, nvidia
from nagara.pool.health import round as round_
from nagara.pool.health.brake import WINDOW_S, Brake
from nagara.pool.health.care import Care
from nagara.pool.health.machine import check_machine, required
from nagara.pool.health.monitor import Monitor
from nagara.pool.health.round import CannotRunError, HealthCheck, UnhealthyError, run_round
from nagara.pool.health.schedule import EVERY_S, Candidate, due
from nagara.pool.health.verdict import failure
from nagara.pool.health.watchdog import Watchdog
from nagara.pool.health.xid import Action, XidPolicy, find_xids
from nagara.pool.states import MachineState
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

EXPECTED = nvidia.Expected(8, "h100", "550.54")


async def outcomes(nvml: FakeNvml, expected: nvidia.Expected | None = EXPECTED) -> dict[str, str]:
    done = await run_round(CheckKind.BOOT, nvidia.checks(nvml, expected))
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
        ({"name": "NVIDIA A100"}, "devices", "expected h100"),
    ],
)
async def test_a_fault_of_one_device_is_found(
    changes: dict[str, object], check: str, text: str
) -> None:
    nvml = FakeNvml()
    nvml.change(5, **changes)
    seen = await outcomes(nvml)
    assert seen[check].startswith("fail")
    assert text in seen[check]


async def test_missing_lost_and_old_are_found() -> None:
    assert "7 devices, expected 8" in (await outcomes(FakeNvml(7)))["devices"]
    assert "older than" in (await outcomes(FakeNvml(version="535.1")))["driver"]
    lost = FakeNvml()
    lost.lost = "a device does not answer: GPU is lost"
    assert all(
        text.startswith("fail") for name, text in (await outcomes(lost)).items() if name != "driver"
    )


async def test_devices_that_do_not_count_errors_say_nothing_of_them() -> None:
    nvml = FakeNvml(1)
    nvml.change(0, ecc_uncorrected=None, remap_failed=None, remap_pending=None)
    seen = await outcomes(nvml, None)
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


# -- what follows ----------------------------------------------------------------------------


def ready_core(count: int) -> tuple[PoolCore, list[str]]:
    core = a_core()
    return core, [make_ready(core, an_offering()) for _ in range(count)]


def states(core: PoolCore) -> list[MachineState]:
    return [machine.state for machine in core.table]


def test_a_suspect_machine_is_diagnosed_and_comes_back_when_it_passes() -> None:
    (core, (name, *_)), care = ready_core(10), Care()
    assert care.suspect(core, name, "illegal memory access", 1.0)
    (check,) = [one for one in core.take_actions() if isinstance(one, Check)]
    assert check.kind is CheckKind.MEDIUM
    core.checked(check, 100.0, None)
    assert core.table.named(name).state is MachineState.READY


@pytest.mark.parametrize(
    ("code", "state", "is_kept_out"),
    [
        (13, MachineState.READY, False),
        (9999, MachineState.READY, True),
        (94, MachineState.DIAGNOSING, True),
        (79, MachineState.QUARANTINED, True),
    ],
)
def test_an_xid_has_the_consequence_of_the_table(
    code: int, state: MachineState, is_kept_out: bool
) -> None:
    core, (name, *_) = ready_core(10)
    Care().device_event(core, name, DeviceEvent(code, "0000:3b:00", ""), 1.0)
    machine = core.table.named(name)
    assert (machine.state, machine.is_kept_out) == (state, is_kept_out)


def test_when_many_fall_ill_at_once_the_check_is_suspect_and_nobody_is_removed() -> None:
    (core, names), care = ready_core(10), Care()
    taken = [care.suspect(core, name, "bad", 1.0) for name in names[:6]]
    assert taken == [True, True, False, False, False, False]
    assert states(core).count(MachineState.READY) == 8
    assert "check is suspect" in care.alerts[0]


def test_the_brake_needs_a_share_and_a_number_and_lets_go_again() -> None:
    brake = Brake()
    assert all(brake.may_remove("small", f"m{n}", 4, 0.0) for n in range(2))
    assert not brake.may_remove("small", "m2", 4, 0.0)
    assert all(brake.may_remove("big", f"m{n}", 100, 0.0) for n in range(20))
    assert not brake.may_remove("big", "m20", 100, 0.0)
    assert brake.is_on("small", 4, WINDOW_S)
    assert not brake.is_on("small", 4, WINDOW_S + 1)
    assert brake.may_remove("small", "m9", 4, WINDOW_S + 1)


def idle(count: int, checked_s: float | None = None) -> list[Candidate]:
    return [Candidate(f"m{number}", 2, checked_s) for number in range(count)]


def test_heavy_diagnostics_take_few_idle_machines_at_once() -> None:
    assert len(due(idle(10), 10, 0, level=20, target=0, now_s=0.0)) == 1
    assert len(due(idle(100), 100, 0, level=200, target=0, now_s=0.0)) == 5
    assert due(idle(100), 100, 5, level=200, target=0, now_s=0.0) == []


def test_heavy_diagnostics_never_bring_the_pool_below_its_target() -> None:
    assert due(idle(100), 100, 0, level=6, target=3, now_s=0.0) == ["m0"]
    assert due(idle(100), 100, 0, level=6, target=5, now_s=0.0) == []


def test_machines_are_diagnosed_weekly_the_longest_unchecked_first() -> None:
    some = [Candidate("new", 1, EVERY_S), Candidate("old", 1, 0.0), Candidate("never", 1, None)]
    assert due(some, 3, 0, 9, 0, now_s=EVERY_S + 1) == ["never"]
    assert due(some[:2], 3, 0, 9, 0, now_s=EVERY_S + 1) == ["old"]
    assert due(some[:1], 3, 0, 9, 0, now_s=EVERY_S + 1) == []


def test_the_weekly_round_is_the_heavy_one() -> None:
    (core, _), care = ready_core(3), Care()
    care.look_at_schedule(core, 0.0, 0.0)
    assert states(core).count(MachineState.DIAGNOSING) == 0
    care.look_at_schedule(core, 0.0, EVERY_S + 1)
    (check,) = [one for one in core.take_actions() if isinstance(one, Check)]
    assert check.kind is CheckKind.HEAVY
    core.checked(check, EVERY_S + 2, None)
    assert states(core) == [MachineState.READY] * 3


def test_a_monitor_that_lives_without_progress_is_stuck() -> None:
    dog = Watchdog()
    dog.expect("vitals", 10.0, 0.0)
    for second in range(0, 60, 10):
        dog.progress("vitals", 1, float(second))
    assert dog.stuck(29.0) == []
    assert dog.stuck(31.0) == ["vitals"]
    dog.progress("vitals", 2, 32.0)
    assert dog.stuck(33.0) == []


def test_a_machine_whose_monitor_is_stuck_gets_no_new_leases_until_it_speaks_again() -> None:
    (core, (name,)), care = ready_core(1), Care()
    machine = core.table.named(name)
    care.watch(core, 30.0, 0.0)
    care.seen(core, name, Vitals(1, (), ()), 30.0)
    assert care.watch(core, 30.0, 60.0) == []
    care.seen(core, name, Vitals(1, (), ()), 120.0)
    assert care.watch(core, 30.0, 121.0) == [f"monitor of {name}"]
    assert machine.is_kept_out
    care.seen(core, name, Vitals(2, (), ()), 150.0)
    assert care.watch(core, 30.0, 151.0) == []
    assert not machine.is_kept_out
    core.keep_out(name, "Xid 9999")
    care.watch(core, 30.0, 300.0)
    care.seen(core, name, Vitals(3, (), ()), 301.0)
    care.watch(core, 30.0, 302.0)
    assert machine.kept_out == {"Xid 9999"}


def test_what_a_monitor_finds_has_consequences() -> None:
    (core, names), care = ready_core(10), Care()
    care.seen(core, names[0], Vitals(1, (DeviceEvent(79, "0000:3b:00", ""),), ()), 1.0)
    hot = CheckResult("temperature and throttling", Outcome.FAIL, "95 °C")
    care.seen(core, names[1], Vitals(1, (), (hot,)), 1.0)
    unknown = CheckResult("devices", Outcome.DID_NOT_RUN, "no driver")
    care.seen(core, names[2], Vitals(1, (), (unknown,)), 1.0)
    assert states(core)[:3] == [
        MachineState.QUARANTINED, MachineState.DIAGNOSING, MachineState.READY,
    ]  # fmt: skip


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
            if name == "cuMemcpyDtoH_v2":
                for at in range(len(arguments[0])):  # type: ignore[arg-type]
                    arguments[0][at] = 0 if self.wrong else at  # type: ignore[index]
            return 0

        return call


def test_a_kernel_runs_on_every_device_and_everything_is_given_back() -> None:
    driver = FakeCuda(3)
    assert cuda.probe(driver) == 3
    for name in ("cuLaunchKernel", "cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"):
        assert driver.calls.count(name) == 3


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
