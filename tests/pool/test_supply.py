import itertools

import hypothesis.strategies as st
from hypothesis import given

from nagara.pool.supply import FIRST_PAUSE_S, HALF_LIFE_S, LONGEST_PAUSE_S, Supply
from nagara.testing.pools import an_offering

KIND = an_offering("a")


def test_an_offering_nobody_tried_gets_one_machine() -> None:
    assert Supply().usable(KIND, 0.0) == 1


def test_rounds_of_grants_double() -> None:
    supply, sizes = Supply(), []
    for step in range(5):
        now_s = 10.0 * step
        sizes.append(supply.usable(KIND, now_s))
        for _ in range(sizes[-1]):
            supply.granted("a", now_s)
    assert sizes[0] == 1
    assert all(later >= 1.5 * earlier for earlier, later in itertools.pairwise(sizes))


def test_a_refusal_closes_the_offering_then_one_machine_is_tried() -> None:
    supply = Supply()
    for _ in range(20):
        supply.granted("a", 0.0)
    supply.refused("a", "sold out", 1.0)
    assert supply.usable(KIND, 2.0) == 0
    assert supply.why_closed("a", 2.0) == "sold out"
    assert supply.usable(KIND, 1.0 + FIRST_PAUSE_S) == 1
    assert supply.why_closed("a", 1.0 + FIRST_PAUSE_S) is None


def test_pauses_double_up_to_a_limit_while_nothing_comes() -> None:
    supply, now_s, pauses = Supply(), 0.0, []
    for _ in range(8):
        supply.refused("a", "sold out", now_s)
        begun_s = now_s
        while supply.usable(KIND, now_s) == 0:
            now_s += 1.0
        pauses.append(now_s - begun_s)
    assert pauses[:3] == [60.0, 120.0, 240.0]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_the_refusals_of_one_round_are_one() -> None:
    supply = Supply()
    for _ in range(10):
        supply.refused("a", "sold out", 0.0)
    assert supply.usable(KIND, FIRST_PAUSE_S) == 1


def test_advertised_stock_is_only_an_upper_bound() -> None:
    supply = Supply()
    for _ in range(50):
        supply.granted("a", 0.0)
    assert supply.usable(an_offering("a", stock=3), 0.0) == 3
    assert Supply().usable(an_offering("a", stock=1000), 0.0) == 1
    assert Supply().usable(an_offering("a", stock=0), 0.0) == 0


def test_what_was_seen_long_ago_is_forgotten() -> None:
    supply = Supply()
    for _ in range(64):
        supply.granted("a", 0.0)
    assert supply.usable(KIND, 0.0) == 65
    assert supply.usable(KIND, 12 * HALF_LIFE_S) == 1


def test_machines_that_never_come_close_an_offering_and_make_it_dear() -> None:
    supply = Supply()
    for _ in range(6):
        supply.granted("a", 0.0)
        supply.failed_boot("a", "never booted", 0.0)
    assert supply.usable(KIND, 1.0) == 0
    assert supply.boot_success("a", 1.0) < 0.5
    assert supply.effective_price_h(KIND, 300.0, 1.0) > 2 * KIND.price_h
    assert not supply.is_proven("a", 1.0)


def test_single_failures_among_good_boots_close_nothing() -> None:
    supply = Supply()
    for _ in range(10):
        supply.granted("a", 0.0)
        supply.booted("a", 0.0)
    supply.failed_boot("a", "bad", 0.0)
    assert supply.usable(KIND, 1.0) > 0
    assert supply.is_proven("a", 1.0)


def test_machines_that_are_taken_away_make_an_offering_dear() -> None:
    supply = Supply()
    supply.ran("a", 10.0, 0.0)
    for _ in range(5):
        supply.reclaimed("a", 0.0)
    assert supply.effective_price_h(KIND, 3600.0, 0.0) > 1.9 * KIND.price_h


@given(st.lists(st.tuples(st.sampled_from(["granted", "refused", "booted", "failed"]),
                          st.floats(0, 4000)), max_size=40))  # fmt: skip
def test_whatever_is_seen_the_answer_stays_in_its_bounds(events: list[tuple[str, float]]) -> None:
    supply, now_s = Supply(), 0.0
    for what, later_s in events:
        now_s += later_s
        if what == "granted":
            supply.granted("a", now_s)
        elif what == "booted":
            supply.booted("a", now_s)
        elif what == "refused":
            supply.refused("a", "no", now_s)
        else:
            supply.failed_boot("a", "no", now_s)
        assert 0 <= supply.usable(an_offering("a", stock=30), now_s) <= 30
        assert 0 < supply.boot_success("a", now_s) <= 1
    assert supply.usable(KIND, now_s + 2 * LONGEST_PAUSE_S) >= 1
