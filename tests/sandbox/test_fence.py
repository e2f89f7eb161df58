import math

import hypothesis.strategies as st
from hypothesis import given

from nagara.contract.machine import Renewal
from nagara.contract.replica import Lease
from nagara.pool.lease import SKEW_S, TTL_S, LeaseClock, slot_name, split_slot
from nagara.sandbox.fence import LONGEST_TTL_S, Fence


def renewal(epoch: int, mark_s: float, slot: str = "m/0") -> Renewal:
    return Renewal(slot, epoch, mark_s, TTL_S)


def test_slots_of_several_devices_have_one_name() -> None:
    assert split_slot(slot_name("m/1", (0, 2))) == ("m/1", (0, 2))


def test_an_old_epoch_is_refused_also_through_another_slot_of_the_same_device() -> None:
    fence = Fence()
    assert fence.begin(renewal(4, 0.0, "m/0+1"), now_s=1.0) == ()
    assert not fence.admits("m/1", 3)
    assert fence.begin(renewal(3, 0.0, "m/1"), now_s=1.0) is None
    assert fence.admits("m/1", 4)


def test_a_higher_epoch_ends_what_runs_under_the_old_one() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0), now_s=0.0)
    assert fence.raise_to("m/0", 2) == ("m/0",)
    assert fence.renew((renewal(1, 0.0),), now_s=1.0) == ("m/0",)


def test_a_lease_that_is_not_renewed_ends_and_stays_ended() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0), now_s=0.0)
    assert fence.next_end_s() == TTL_S
    assert fence.expire(TTL_S - 0.1) == ()
    assert fence.expire(TTL_S) == ("m/0",)
    assert fence.renew((renewal(1, TTL_S),), now_s=TTL_S) == ("m/0",)


def test_a_renewal_that_was_held_up_prolongs_nothing() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0), now_s=0.0)
    fence.renew((renewal(1, 0.0),), now_s=14.0)
    assert fence.next_end_s() == TTL_S


def test_an_end_that_was_counted_from_another_boot_of_the_machine_is_refused() -> None:
    assert Fence().begin(renewal(1, 2 * LONGEST_TTL_S), now_s=10.0) is None


def test_a_lease_without_an_end_holds_until_another_follows_it() -> None:
    fence = Fence()
    assert fence.begin(Renewal("m/0", 1, 0.0, math.inf), now_s=5.0) == ()
    assert fence.next_end_s() is None
    assert fence.expire(1e9) == ()
    assert fence.begin(Renewal("m/0", 2, 0.0, math.inf), now_s=5.0) == ("m/0",)


def test_what_was_refused_stays_refused_by_a_successor_that_knows_the_newest_epochs() -> None:
    fence = Fence()
    fence.raise_to("m/0", 4)
    assert Fence(fence.newest).begin(renewal(3, 0.0), now_s=1.0) is None


def test_a_start_whose_order_was_held_up_is_refused() -> None:
    assert Fence().begin(renewal(1, 0.0), now_s=TTL_S) is None


def test_a_call_for_a_machine_that_had_our_address_before_touches_nothing_of_ours() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0, "m2/0"), now_s=1.0)
    assert fence.begin(renewal(9, 0.0, "m1/0"), now_s=2.0) is None
    assert fence.begin(renewal(9, 0.0, "m1/1"), now_s=2.0) is None
    assert fence.raise_to("m1/0", 10) == ()
    assert fence.renew((renewal(1, 5.0, "m1/0"),), now_s=6.0) == ("m1/0",)
    assert fence.admits("m2/0", 1)
    assert fence.next_end_s() == TTL_S
    assert fence.begin(renewal(1, 0.0, "m2/1"), now_s=2.0) == ()


def test_an_empty_machine_may_get_another_name() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0, "m1/0"), now_s=1.0)
    assert fence.begin(renewal(1, 0.0, "m2/0"), now_s=2.0) is None
    fence.end(renewal(1, 0.0, "m1/0"))
    assert fence.begin(renewal(1, 0.0, "m2/0"), now_s=2.0) == ()


def test_a_start_that_is_late_is_not_followed_once_its_lease_was_ended() -> None:
    fence = Fence()
    fence.raise_to("m/0", 2)
    assert fence.begin(renewal(1, 0.0), now_s=1.0) is None


def test_a_start_names_what_must_be_ended_first() -> None:
    fence = Fence()
    fence.begin(renewal(1, 0.0, "m/0"), now_s=0.0)
    assert fence.begin(renewal(2, 0.0, "m/0+1"), now_s=1.0) == ("m/0",)


def test_an_ended_replica_needs_no_end() -> None:
    fence = Fence()
    fence.begin(renewal(2, 0.0), now_s=0.0)
    fence.end(Lease("m/0", 1))
    assert fence.next_end_s() == TTL_S
    fence.end(Lease("m/0", 2))
    assert fence.next_end_s() is None


def test_after_a_restart_the_whole_time_is_waited_for() -> None:
    assert LeaseClock().free_at_s(100.0) == 100.0 + TTL_S + SKEW_S


@given(
    offset_s=st.floats(-1e6, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20), st.booleans()), max_size=12),
)
def test_a_slot_is_never_granted_again_while_its_machine_still_runs_it(
    offset_s: float, steps: list[tuple[float, float, bool]]
) -> None:
    """Whatever is lost or late: the machine's end lies before the pool's `free_at_s`."""
    fence, clock, now_s = Fence(), LeaseClock(), 0.0
    clock.received(offset_s, now_s)
    mark_s = clock.to_send(now_s)
    assert mark_s is not None
    fence.begin(renewal(1, mark_s), now_s + offset_s)
    for pause_s, delay_s, is_answered in steps:
        now_s += pause_s
        fence.expire(now_s + offset_s)
        if (sent := clock.to_send(now_s)) is not None:
            fence.renew((renewal(1, sent),), now_s + offset_s)
        mark = now_s + offset_s
        now_s += delay_s
        if is_answered:
            clock.received(mark, now_s)
    end_s = fence.next_end_s()
    assert end_s is None or end_s - offset_s <= clock.free_at_s(now_s) - SKEW_S + 1e-6
