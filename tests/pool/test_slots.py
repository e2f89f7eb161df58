"""Local slots: who holds which."""

import pytest

from nagara.contract.replica import Lease
from nagara.pool.slots import Slots


def test_no_slot_is_granted_twice() -> None:
    slots = Slots(3)
    leases = [slots.claim() for _ in range(3)]
    assert len({lease.slot for lease in leases if lease}) == 3
    assert slots.claim() is None
    assert slots.free == 0


def test_an_epoch_is_higher_with_each_grant_and_old_leases_count_nothing() -> None:
    slots = Slots(1)
    first = slots.claim()
    assert first is not None
    assert slots.release(first)
    second = slots.claim()
    assert second is not None
    assert second.epoch == first.epoch + 1
    assert not slots.release(first)
    assert slots.claim() is None


def test_leases_of_an_earlier_process_are_kept_around_claims() -> None:
    slots = Slots(2)
    old = Lease("local-0", 7)
    assert slots.adopt(old)
    assert slots.adopt(old)
    assert not slots.adopt(Lease("local-0", 8))
    claimed = slots.claim()
    assert claimed is not None
    assert claimed.slot == "local-1"
    assert slots.claim() is None
    slots.release(old)
    assert slots.claim() == Lease("local-0", 8)


def test_a_slot_beyond_the_present_count_is_not_granted_again() -> None:
    slots = Slots(1)
    old = Lease("local-5", 3)
    assert slots.adopt(old)
    assert slots.free == 1
    assert slots.release(old)
    assert slots.claim() is not None
    assert slots.claim() is None


def test_recorded_epochs_are_passed() -> None:
    slots = Slots(1)
    slots.raise_epochs({"local-0": 41, "local-9": 1})
    assert slots.claim() == Lease("local-0", 42)


def test_a_machine_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        Slots(0)
