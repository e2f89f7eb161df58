"""What follows from suspicion, from device events and from the calendar."""

import pytest

from nagara.contract.machine import (
    CheckKind,
    CheckResult,
    DeviceEvent,
    HealthReport,
    Outcome,
    Vitals,
)
from nagara.pool.actions import Check, NoSlot
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import ANY
from nagara.pool.fairness import Claimant
from nagara.pool.health.brake import WINDOW_S, Brake
from nagara.pool.health.care import Care
from nagara.pool.health.schedule import EVERY_S, Candidate, due
from nagara.pool.health.watchdog import Watchdog
from nagara.pool.states import MachineState
from nagara.testing.pools import a_core, an_offering, make_ready


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
    care.watch(core, 30.0, 60.0)
    assert not machine.is_kept_out
    care.seen(core, name, Vitals(1, (), ()), 120.0)
    care.watch(core, 30.0, 121.0)
    for second in (121.0, 122.0):
        care.look_for_stuck(second)
    assert [one for one in care.alerts if f"monitor of {name}" in one] == care.alerts
    assert len(care.alerts) == 1
    assert machine.is_kept_out
    care.seen(core, name, Vitals(2, (), ()), 150.0)
    care.watch(core, 30.0, 151.0)
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


def checks(core: PoolCore) -> list[Check]:
    return [one for one in core.take_actions() if isinstance(one, Check)]


def test_a_machine_that_is_kept_out_comes_back_by_passing_diagnostics_once_empty() -> None:
    (core, (name,)), care = ready_core(1), Care()
    granted = core.claim(Claimant("app"), ANY, 0.0)
    assert not isinstance(granted, NoSlot)
    care.device_event(core, name, DeviceEvent(9999, "0000:3b:00", ""), 1.0)
    care.look_at_schedule(core, 5.0, 2.0)
    assert checks(core) == []
    core.give_back(granted.lease, 3.0, is_confirmed=True)
    care.look_at_schedule(core, 5.0, 4.0)
    (check,) = checks(core)
    assert check.kind is CheckKind.MEDIUM
    assert "9999" in core.table.named(name).reason
    core.checked(check, 5.0, None)
    assert not core.table.named(name).is_kept_out
    assert not isinstance(core.claim(Claimant("app"), ANY, 6.0), NoSlot)


def test_when_many_are_kept_out_few_are_diagnosed_at_once() -> None:
    (core, names), care = ready_core(40), Care()
    for name in names[:8]:
        care.device_event(core, name, DeviceEvent(9999, "0000:3b:00", ""), 1.0)
    for _ in range(3):
        care.look_at_schedule(core, 0.0, 2.0)
        assert states(core).count(MachineState.DIAGNOSING) == 2
    for check in checks(core):
        core.checked(check, 3.0, None)
    care.look_at_schedule(core, 0.0, 4.0)
    assert states(core).count(MachineState.DIAGNOSING) == 2
    assert sum(one.is_kept_out for one in core.table) == 6


def test_a_code_that_nobody_knows_on_every_machine_does_not_close_the_pool() -> None:
    (core, names), care = ready_core(10), Care()
    for name in names:
        care.device_event(core, name, DeviceEvent(9999, "0000:3b:00", ""), 1.0)
    assert sum(one.is_kept_out for one in core.table) == 2
    assert "check is suspect" in care.alerts[-1]
    care.device_event(core, names[9], DeviceEvent(79, "0000:3b:00", ""), 2.0)
    assert core.table.named(names[9]).is_kept_out


def test_heavy_diagnostics_come_weekly_however_often_nagara_is_restarted() -> None:
    (core, (name,)), care, now_s = ready_core(1), Care(), 0.0
    care.look_at_schedule(core, 0.0, now_s)
    for _ in range(7):
        assert checks(core) == []
        kept = care.to_document(now_s + 80_000.0)
        care, now_s = Care(), 5.0  # a new process, and another boot of its host
        care.load(kept, now_s, 10_000.0)
        care.look_at_schedule(core, 0.0, now_s)
    (check,) = checks(core)
    assert (check.name, check.kind) == (name, CheckKind.HEAVY)


def test_a_machine_whose_monitor_stays_silent_is_diagnosed_too() -> None:
    (core, (name,)), care = ready_core(1), Care()
    care.watch(core, 30.0, 0.0)
    care.watch(core, 30.0, 121.0)
    care.look_at_schedule(core, 0.0, 122.0)
    assert core.table.named(name).state is MachineState.DIAGNOSING
    (check,) = checks(core)
    core.checked(check, 123.0, "compute: the probe hung")
    assert core.table.named(name).state is MachineState.QUARANTINED


def test_only_heavy_diagnostics_put_off_the_weekly_ones() -> None:
    (core, (name, *_)), care = ready_core(2), Care()
    care.look_at_schedule(core, 0.0, 0.0)
    care.checked(name, HealthReport(CheckKind.MEDIUM, ()), None, EVERY_S - 10)
    care.look_at_schedule(core, 0.0, EVERY_S + 1)
    (check,) = checks(core)
    assert (check.name, check.kind) == (name, CheckKind.HEAVY)
    core.checked(check, EVERY_S + 2, None)
    care.checked(name, HealthReport(CheckKind.HEAVY, ()), None, EVERY_S + 2)
    care.look_at_schedule(core, 0.0, EVERY_S + 3)
    assert [one.name for one in checks(core)] != [name]


def test_machines_that_passed_do_not_hold_the_brake_any_longer() -> None:
    (core, names), care = ready_core(10), Care()
    for name in names[:3]:
        care.suspect(core, name, "bad", 1.0)
    assert care.brake.is_on("h100", 10, 1.0)
    for check in checks(core):
        core.checked(check, 2.0, None)
        care.checked(check.name, HealthReport(check.kind, ()), None, 2.0)
    assert not care.brake.is_on("h100", 10, 2.0)
    assert care.suspect(core, names[5], "bad", 3.0)
