import pytest

from nagara.contract.machine import CheckKind, Presence, ProviderMachine, Resources
from nagara.contract.replica import Lease
from nagara.pool.actions import Check, Granted, Launch, NoSlot, Release
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import IllegalEventError, UnknownMachineError
from nagara.pool.fairness import Claimant
from nagara.pool.lease import SKEW_S, TTL_S
from nagara.pool.ledger import MemoryLedger
from nagara.pool.states import DEADLINES_S, MachineEvent, MachineState
from nagara.testing.pools import a_core, an_offering, make_ready

ANY = DemandClass()
APP = Claimant("app")


def claim(core: PoolCore, wanted: DemandClass = ANY, app: str = "app", **kind: object) -> Granted:
    granted = core.claim(Claimant(app), wanted, 0.0, **kind)  # type: ignore[arg-type]
    assert isinstance(granted, Granted), granted
    return granted


def listing(*names: str) -> list[ProviderMachine]:
    return [ProviderMachine(name, "a", Presence.RUNNING) for name in names]


def test_a_machine_is_recorded_before_its_launch_is_asked_for() -> None:
    core = a_core()
    name = core.request(an_offering(), 0.0)
    writes = core.take_writes()
    assert [row.name for row in writes.machines] == [name]
    assert core.take_actions() == [Launch(name, 1, an_offering())]


def test_a_claim_is_answered_from_memory_and_its_lease_is_to_be_written() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    core.take_writes()
    granted = claim(core)
    assert granted.machine == name
    assert granted.lease == Lease(f"{name}/0", 1)
    (row,) = core.take_writes().leases
    assert (row.slot, row.epoch, row.app) == (f"{name}/0", 1, "app")


def test_no_slot_is_granted_twice_and_the_refusal_says_why() -> None:
    core = a_core()
    make_ready(core, an_offering())
    slots = {claim(core).lease.slot for _ in range(2)}
    assert len(slots) == 2
    refusal = core.claim(APP, ANY, 0.0)
    assert refusal == NoSlot("no free slot on the allowed machines (1 ready)", None)


def test_a_refusal_names_the_earliest_machine_on_its_way() -> None:
    core = a_core()
    core.request(an_offering(), 0.0)
    refusal = core.claim(APP, ANY, 60.0)
    assert isinstance(refusal, NoSlot)
    assert refusal.earliest_s == 240.0


def test_a_machine_that_will_not_come_after_all_is_given_back_and_closes_its_offering() -> None:
    core = a_core()
    name = core.request(an_offering(), 0.0)
    (launch,) = core.take_actions()
    assert isinstance(launch, Launch)
    core.accepted(launch, 1.0)
    listed = ProviderMachine(name, "a", Presence.REFUSED, problem="max_workers")
    core.listed(an_offering().provider, [listed], {}, 30.0, 30.0)
    machine = core.table.named(name)
    assert (machine.state, machine.reason) == (MachineState.RELEASING, "max_workers")
    assert core.take_actions() == [Release(name, machine.epoch, an_offering().provider)]
    assert core.supply.usable(an_offering(), 31.0) == 0
    assert core.supply.why_closed(an_offering().id, 31.0) == "max_workers"


def test_type_and_region_are_hard_limits() -> None:
    core = a_core()
    make_ready(core, an_offering(region="us-1", type="a100"))
    for wanted in (DemandClass(frozenset({"h100"})), DemandClass(regions=("eu-*",))):
        refusal = core.claim(APP, wanted, 0.0)
        assert isinstance(refusal, NoSlot)
        assert "allowed type and region" in refusal.because
    claim(core, DemandClass(frozenset({"a100"}), ("us-*",)))


def test_partly_used_machines_are_filled_first() -> None:
    core = a_core()
    make_ready(core, an_offering())
    make_ready(core, an_offering())
    assert claim(core).machine == claim(core).machine


def test_a_claim_of_two_devices_takes_them_on_one_machine() -> None:
    core = a_core()
    make_ready(core, an_offering())
    claim(core)
    both = DemandClass(devices=2)
    assert isinstance(core.claim(APP, both, 0.0), NoSlot)
    name = make_ready(core, an_offering())
    granted = claim(core, both)
    assert granted.lease == Lease(f"{name}/0+1", 1)


def test_epochs_rise_per_device_whatever_the_slot_is_called() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    one = claim(core)
    core.give_back(one.lease, 1.0, is_confirmed=True)
    both = claim(core, DemandClass(devices=2))
    assert both.lease == Lease(f"{name}/0+1", 2)
    assert not core.give_back(one.lease, 2.0, is_confirmed=True)


def test_a_machine_is_never_filled_to_its_last_core_and_byte() -> None:
    core = a_core()
    make_ready(core, an_offering(devices=8, resources=Resources(10, 100, 100)))
    claim(core, needs=Resources(cpu=8))
    for needs in (Resources(cpu=1), Resources(memory_bytes=91), Resources(disk_bytes=86)):
        assert isinstance(core.claim(APP, ANY, 0.0, needs), NoSlot)
    claim(core, needs=Resources(0.5, 90, 85))


def test_an_unconfirmed_end_frees_the_slot_only_when_the_lease_is_over() -> None:
    core = a_core()
    make_ready(core, an_offering(devices=1))
    granted = claim(core)
    assert core.give_back(granted.lease, 10.0, is_confirmed=False)
    core.tick(10.0 + TTL_S)
    assert isinstance(core.claim(APP, ANY, 20.0), NoSlot)
    core.tick(10.0 + TTL_S + SKEW_S)
    assert claim(core).lease.epoch == 2


def test_after_a_restart_unclaimed_leases_wait_and_claimed_ones_live_on() -> None:
    ledger, core = MemoryLedger(), a_core()
    make_ready(core, an_offering(devices=3))
    kept, lost = claim(core, app="kept"), claim(core, app="lost")
    ledger.write(core.take_writes())
    again = a_core(ledger.read(), now_s=500.0)
    assert again.adopt(kept.lease, "kept")
    assert not again.adopt(lost.lease, "another")
    assert claim(again).lease.slot not in {kept.lease.slot, lost.lease.slot}
    assert isinstance(again.claim(APP, ANY, 501.0), NoSlot)
    again.tick(500.0 + TTL_S + SKEW_S)
    assert claim(again).lease == Lease(lost.lease.slot, lost.lease.epoch + 1)
    assert isinstance(again.claim(APP, ANY, 1000.0), NoSlot)


def test_a_machine_is_not_ready_before_its_checks_have_passed() -> None:
    core = a_core()
    name = core.request(an_offering(), 0.0)
    (launch,) = core.take_actions()
    assert isinstance(launch, Launch)
    core.accepted(launch, 1.0)
    core.listed("p", listing(name), {}, 2.0, 2.0)
    assert isinstance(core.claim(APP, ANY, 3.0), NoSlot)
    (check,) = core.take_actions()
    assert check == Check(name, 3, CheckKind.BOOT)
    core.checked(check, 4.0, "one device is missing")
    assert core.table.named(name).state is MachineState.RELEASING
    assert isinstance(core.claim(APP, ANY, 5.0), NoSlot)


def test_a_machine_that_never_boots_is_given_back_and_counts_against_its_offering() -> None:
    core = a_core()
    core.request(an_offering(), 0.0)
    (launch,) = core.take_actions()
    assert isinstance(launch, Launch)
    core.accepted(launch, 1.0)
    assert core.supply.usable(an_offering(), 2.0) > 0
    core.tick(1.0 + DEADLINES_S[MachineState.BOOTING])
    assert [type(one) for one in core.take_actions()] == [Release]
    assert core.supply.usable(an_offering(), 1230.0) == 0


def test_a_release_is_believed_only_after_two_lists_asked_for_later() -> None:
    core = a_core()
    name = make_ready(core, an_offering(), 0.0)
    core.drain(name, MachineEvent.RELEASE, "not needed", 10.0)
    (release,) = core.take_actions()
    assert isinstance(release, Release)
    core.listed("p", [], {}, 11.0, 11.0)  # asked for before the release was
    core.released(release, 12.0)
    core.listed("p", [], {}, 11.5, 13.0)
    core.listed("p", [], {}, 14.0, 14.0)
    core.listed("p", listing(name), {}, 15.0, 15.0)  # the first absence was a mistake
    core.listed("p", [], {}, 16.0, 16.0)
    assert name in core.table
    core.listed("p", [], {}, 17.0, 17.0)
    assert name not in core.table
    assert core.take_writes().gone == (name,)


def test_a_release_that_returned_early_is_asked_for_again() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    core.drain(name, MachineEvent.RELEASE, "", 0.0)
    core.take_actions()
    core.tick(DEADLINES_S[MachineState.RELEASING])
    assert [type(one) for one in core.take_actions()] == [Release]
    assert name in core.table


def test_an_unknown_machine_of_ours_is_released_and_a_strangers_is_left_alone() -> None:
    core = a_core()
    core.listed("p", listing("n0-left", "someone-else"), {}, 1.0, 1.0)
    assert [one.name for one in core.take_actions()] == ["n0-left"]
    assert [machine.state for machine in core.table] == [MachineState.RELEASING]
    assert core.take_writes().machines


def test_a_launch_whose_outcome_is_unknown_is_found_by_the_list_or_released() -> None:
    core = a_core()
    found, absent = core.request(an_offering(), 0.0), core.request(an_offering(), 0.0)
    for launch in core.take_actions():
        assert isinstance(launch, Launch)
        core.unclear(launch, "connection reset", 1.0)
    core.listed("p", listing(found), {}, 2.0, 2.0)
    core.listed("p", listing(found), {}, 3.0, 3.0)
    assert core.table.named(found).state is MachineState.CHECKING
    assert core.table.named(absent).state is MachineState.REQUESTED
    core.tick(DEADLINES_S[MachineState.REQUESTED])
    assert core.table.named(absent).state is MachineState.RELEASING


def test_a_machine_that_vanishes_takes_its_leases_with_it() -> None:
    core = a_core()
    make_ready(core, an_offering())
    granted = claim(core)
    for second in (1.0, 2.0, 20.0):  # three lists that were asked for in a hurry
        core.listed("p", [], {}, second, second)
    assert not core.take_lost()
    core.listed("p", [], {}, 31.0, 31.0)
    (lost,) = core.take_lost()
    assert (lost.lease, lost.app) == (granted.lease, "app")
    assert core.arbiter.held == {}
    assert not core.give_back(granted.lease, 3.0, is_confirmed=True)


def test_lists_that_lack_many_machines_at_once_are_doubted_for_some_minutes() -> None:
    core = a_core()
    names = [make_ready(core, an_offering()) for _ in range(5)]
    granted = claim(core)
    for second in (30.0, 60.0, 90.0):
        doubt = core.listed("p", [], {}, second, second)
        assert doubt is not None
        assert "lacks 5 of 5" in doubt
    assert [one.state for one in core.table] == 5 * [MachineState.READY]
    assert core.listed("p", listing(*names), {}, 120.0, 120.0) is None
    assert core.take_lost() == []
    assert core.grants.held(granted.lease)
    for second in (150.0, 155.0, 449.0):
        core.listed("p", [], {}, second, second)
    assert len(core.table) == 5
    core.listed("p", [], {}, 450.0, 450.0)
    assert len(core.table) == 0
    assert [one.lease for one in core.take_lost()] == [granted.lease]


def test_a_machine_that_answers_is_there_whatever_its_provider_lists() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    granted = claim(core)
    for second in range(30, 600, 30):
        core.marked(name, second - 1.0, second - 1.0)
        core.listed("p", [], {}, float(second), float(second))
    assert core.grants.held(granted.lease)
    core.listed("p", [], {}, 600.0, 600.0)
    assert name not in core.table


def test_an_answer_from_an_address_that_another_machine_has_now_says_nothing() -> None:
    core = a_core()
    old, new = make_ready(core, an_offering()), make_ready(core, an_offering())
    at = [ProviderMachine(name, "a", Presence.RUNNING, "10.0.0.1") for name in (old, new)]
    core.listed("p", [at[0], *listing(new)], {}, 1.0, 1.0)
    for second in (30.0, 60.0):
        core.marked(old, second, second - 1.0)
        core.listed("p", at[1:], {}, second, second)
    assert [one.name for one in core.table] == [new]


def test_a_few_machines_taken_away_from_a_large_fleet_hardly_change_its_price() -> None:
    core = a_core()
    names = [make_ready(core, an_offering()) for _ in range(50)]
    for minute in range(1, 121):
        core.tick(60.0 * minute)
    for second in (7230.0, 7260.0):
        core.listed("p", listing(*names[2:]), {}, second, second)
    assert len(core.table) == 48
    price = core.supply.effective_price_h(an_offering(), 600.0, 7260.0)
    assert 1.0 < price < 1.02


def test_an_offering_whose_machines_are_soon_taken_away_becomes_dear() -> None:
    core = a_core()
    make_ready(core, an_offering())
    for second in range(1, 61):
        core.tick(float(second))
    core.listed("p", [], {}, 61.0, 61.0)
    core.listed("p", [], {}, 91.0, 91.0)
    assert core.supply.effective_price_h(an_offering(), 600.0, 91.0) > 1.15


def test_a_draining_machine_gets_no_new_leases_and_goes_on_when_empty() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    granted = claim(core)
    core.drain(name, MachineEvent.DIAGNOSE, "a replica failed", 1.0)
    assert isinstance(core.claim(APP, ANY, 1.0), NoSlot)
    core.give_back(granted.lease, 2.0, is_confirmed=True)
    assert core.table.named(name).state is MachineState.DIAGNOSING
    (check,) = core.take_actions()
    assert isinstance(check, Check)
    core.checked(check, 3.0, None)
    claim(core)


def test_a_drain_of_a_person_lasts_until_it_is_ended() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    core.hold(name, "by hand", 0.0)
    core.tick(1e6)
    assert core.table.named(name).state is MachineState.DRAINING
    core.resume(name, 1e6)
    claim(core)


def test_a_drain_that_lasts_too_long_takes_the_leases_away() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    granted = claim(core)
    core.drain(name, MachineEvent.RELEASE, "bad device", 0.0)
    core.tick(DEADLINES_S[MachineState.DRAINING])
    assert core.table.named(name).state is MachineState.RELEASING
    assert [lost.lease for lost in core.take_lost()] == [granted.lease]


def test_a_kept_out_machine_keeps_its_leases_and_gets_no_others() -> None:
    core = a_core()
    name = make_ready(core, an_offering())
    granted = claim(core)
    core.keep_out(name, "an unknown event")
    assert isinstance(core.claim(APP, ANY, 0.0), NoSlot)
    assert core.grants.held(granted.lease)
    core.keep_out(name, "its monitor is silent")
    core.let_in(name, "an unknown event")
    assert isinstance(core.claim(APP, ANY, 0.0), NoSlot)
    core.let_in(name, "its monitor is silent")
    claim(core)


def test_what_keeps_a_machine_out_and_how_it_is_to_be_diagnosed_outlive_a_restart() -> None:
    ledger, core = MemoryLedger(), a_core()
    name = make_ready(core, an_offering())
    other = make_ready(core, an_offering())
    core.keep_out(name, "Xid 9999")
    claimed = claim(core)
    assert claimed.machine == other
    core.diagnose(other, CheckKind.HEAVY, "by hand", 1.0)
    ledger.write(core.take_writes())
    again = a_core(ledger.read(), now_s=500.0)
    assert again.table.named(name).kept_out == {"Xid 9999"}
    assert isinstance(again.claim(APP, ANY, 500.0), NoSlot)
    again.give_back(claimed.lease, 501.0, is_confirmed=True)
    assert again.take_actions() == [Check(other, again.table.named(other).epoch, CheckKind.HEAVY)]


def test_an_order_for_a_machine_that_cannot_follow_it_raises() -> None:
    core = a_core()
    name = core.request(an_offering(), 0.0)
    with pytest.raises(IllegalEventError):
        core.drain(name, MachineEvent.DIAGNOSE, "", 0.0)
    with pytest.raises(UnknownMachineError):
        core.drain("nobody", MachineEvent.RELEASE, "", 0.0)


def test_a_late_answer_about_an_earlier_state_changes_nothing() -> None:
    core = a_core()
    name = core.request(an_offering(), 0.0)
    (launch,) = core.take_actions()
    assert isinstance(launch, Launch)
    core.listed("p", listing(name), {}, 1.0, 1.0)
    (check,) = core.take_actions()
    assert isinstance(check, Check)
    core.accepted(launch, 2.0)
    core.refused(launch, "a contradiction", 2.0)
    assert core.table.named(name).state is MachineState.CHECKING
    core.tick(1e4)
    core.checked(check, 1e4, None)
    assert core.table.named(name).state is MachineState.RELEASING


def test_the_needs_of_running_replicas_are_known_on_average() -> None:
    core = a_core()
    make_ready(core, an_offering(devices=4, resources=Resources(100, 100, 100)))
    claim(core, needs=Resources(cpu=2.0))
    both = claim(core, needs=Resources(cpu=4.0, memory_bytes=10))
    assert core.grants.mean_needs(ANY) == Resources(3.0, 5, 0)
    core.give_back(both.lease, 1.0, is_confirmed=True)
    assert core.grants.mean_needs(ANY) == Resources(2.0, 0, 0)
