"""The pure decision: rules, and the faults that autoscalers have had."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.control.autoscaler import (
    DECREASE_EVERY_S,
    PANIC_S,
    Decision,
    Demand,
    Memory,
    ReplicaView,
    Rules,
    after_restart,
    decide,
    missing_now,
)
from nagara.control.demand import DemandWindow
from nagara.control.keepalive import Warm, auto_idle_s, hold_s, pre_warm

RULES = Rules(min=0, max=10, concurrency=2, idle_s=60.0)


def demand(
    now: int = 0, held: int = 0, mean60: float = 0.0, mean2: float = 0.0, idle_s: float = 0.0
) -> Demand:
    return Demand(now, held, mean60, mean2, idle_s)


def ready(count: int, running: int = 0) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(f"r{i}", True, running, 0.0 if running else 10.0 + i) for i in range(count)
    )


def starting(count: int) -> tuple[ReplicaView, ...]:
    return tuple(ReplicaView(f"s{i}", False) for i in range(count))


@pytest.mark.parametrize(
    ("mean60", "mean2", "desired"),
    [(1.4, 0.0, 1), (1.5, 0.0, 2), (0.0, 4.0, 2), (0.0, 4.1, 3), (7.0, 4.0, 5), (100.0, 0.0, 10)],
)
def test_desired_is_the_larger_of_the_two_windows(
    mean60: float, mean2: float, desired: int
) -> None:
    decision, _ = decide(0.0, RULES, Memory(), demand(4, 0, mean60, mean2), ready(1, 2))
    assert decision.desired == desired


def test_nothing_is_started_for_an_app_nobody_calls() -> None:
    assert decide(0.0, RULES, Memory(), demand(idle_s=100), ())[0] == Decision(
        0, reason="no request for 60 s"
    )


def test_a_held_request_without_replicas_starts_one_at_once() -> None:
    assert decide(0.0, RULES, Memory(), demand(1, 1), ())[0].start == 1


def test_starting_replicas_count_so_slow_starts_are_not_multiplied() -> None:
    for _ in range(100):
        decision, _ = decide(0.0, RULES, Memory(), demand(8, 8, 8.0, 8.0), starting(6))
        assert decision.start == 0


def test_a_start_longer_than_the_windows_is_not_cancelled_while_a_request_waits() -> None:
    memory = Memory()
    for second in range(600):
        decision, memory = decide(float(second), RULES, memory, demand(1, 1, 1.0, 1.0), starting(1))
        assert decision.cancel == ()


def test_panic_keeps_the_count_for_a_minute_after_the_burst() -> None:
    decision, memory = decide(0.0, RULES, Memory(), demand(8, 6, 1.0, 8.0), ready(1, 2))
    assert decision.start == 3
    calm = demand(1, 0, 0.5, 0.5)
    for second in (1.0, 30.0, PANIC_S - 1):
        # Replicas that are still starting take part: leaving panic must not forget them.
        decision, memory = decide(second, RULES, memory, calm, (*ready(1), *starting(3)))
        assert (decision.start, decision.cancel, decision.drain) == (0, (), ())
    decision, _ = decide(PANIC_S + 1, RULES, memory, calm, ready(4))
    assert len(decision.drain) == 2


def test_after_a_restart_nothing_is_given_up_for_a_minute() -> None:
    empty = demand(idle_s=1000)
    memory = after_restart(0.0)
    decision, memory = decide(30.0, RULES, memory, empty, ready(4))
    assert decision.drain == ()
    decision, _ = decide(61.0, RULES, memory, empty, ready(4))
    assert len(decision.drain) == 2


def test_at_most_half_goes_in_thirty_seconds() -> None:
    counts = []
    memory, count = Memory(), 9
    for second in range(200):
        decision, memory = decide(float(second), RULES, memory, demand(idle_s=1e3), ready(count))
        count -= len(decision.drain)
        counts.append(count)
    assert [counts[second] for second in (0, 29, 30, 60, 90, 199)] == [4, 4, 2, 1, 0, 0]
    assert DECREASE_EVERY_S == 30.0


def test_starting_ones_go_first_then_the_longest_idle() -> None:
    replicas = (*ready(4), *starting(1))
    decision, _ = decide(0.0, RULES, Memory(), demand(1, 0, 1.0, 1.0), replicas)
    assert decision.cancel == ("s0",)
    assert decision.drain == ("r3", "r2")


def test_a_replica_with_work_is_never_drained() -> None:
    decision, _ = decide(0.0, RULES, Memory(), demand(8, 0, 1.0, 1.0), ready(8, running=1))
    assert (decision.drain, decision.reason) == ((), "every replica has work")


def test_a_start_that_never_ends_does_not_freeze_scaling_down() -> None:
    decision, _ = decide(0.0, RULES, Memory(), demand(1, 0, 1.0, 1.0), (*ready(3), *starting(1)))
    assert decision.cancel == ("s0",)
    assert decision.drain == ("r2",)


def test_the_last_replica_stays_for_the_keep_alive_time() -> None:
    rules = Rules(0, 4, 2, idle_s=300.0)
    assert decide(0.0, rules, Memory(), demand(idle_s=299), ready(1))[0].drain == ()
    assert decide(0.0, rules, Memory(), demand(idle_s=300), ready(1))[0].drain == ("r0",)


def test_a_short_keep_alive_ends_before_the_long_window_does() -> None:
    rules = Rules(0, 4, 2, idle_s=1.0)
    recent = demand(idle_s=1.0, mean60=1.0, mean2=0.5)
    assert decide(0.0, rules, Memory(), recent, ready(1))[0].drain == ("r0",)


def test_past_demand_brings_no_replica_back() -> None:
    recent = demand(idle_s=1.0, mean60=5.0, mean2=5.0)
    assert decide(0.0, RULES, Memory(), recent, ())[0].start == 0
    assert decide(0.0, RULES, Memory(), recent, ready(1))[0].start == 0


def test_min_is_kept_and_max_not_passed() -> None:
    rules = Rules(2, 3, 2, idle_s=1.0)
    assert decide(0.0, rules, Memory(), demand(idle_s=1e3), ())[0].start == 2
    assert decide(0.0, rules, Memory(), demand(50, 50, 50.0, 50.0), ())[0].start == 3


def test_without_a_demand_figure_nothing_changes() -> None:
    decision, memory = decide(0.0, RULES, Memory(), None, ready(3))
    assert (decision.desired, decision.start, decision.drain) == (3, 0, ())
    assert memory == Memory()


def test_keep_alive_grows_with_the_cost_of_a_start() -> None:
    assert [auto_idle_s(start_s) for start_s in (None, 1.0, 20.0, 1000.0)] == [60, 60, 200, 900]


def test_steady_load_with_slow_starts_settles_and_serves_everything() -> None:
    """5 requests a second of 1 s each, 2 at a time, starts of 8 s, in simulated time."""
    rules = Rules(0, 10, 2, 60.0)
    step_s, start_s = 0.1, 8.0
    window, memory = DemandWindow(0.0), Memory()
    starting: list[float] = []
    busy: list[float] = []
    ready, held, served, starts, counts = 0, 0, 0, 0, []
    for step in range(3000):
        now_s = step * step_s
        if step % 2 == 0:
            window.enter(now_s)
            held += 1
        for end_s in [end_s for end_s in busy if end_s <= now_s]:
            busy.remove(end_s)
            window.leave(now_s)
            served += 1
        ready += sum(ready_s <= now_s for ready_s in starting)
        starting = [ready_s for ready_s in starting if ready_s > now_s]
        while held and len(busy) < 2 * ready:
            held -= 1
            busy.append(now_s + 1.0)
        if step % 10:
            continue
        views = (
            *(ReplicaView(f"r{i}", True, 1 if 2 * i < len(busy) else 0, 1.0) for i in range(ready)),
            *(ReplicaView(f"s{i}", False) for i in range(len(starting))),
        )
        means = window.mean(60.0, now_s), window.mean(2.0, now_s)
        decision, memory = decide(
            now_s, rules, memory, Demand(window.now, held, *means, 0.0), views
        )
        starts += decision.start
        starting += [now_s + start_s] * decision.start
        starting = starting[: len(starting) - len(decision.cancel)]
        ready -= len(decision.drain)
        counts.append(ready + len(starting))
    assert served >= 1490
    assert held == 0
    assert max(counts) <= 10
    assert set(counts[200:]) == {4}  # 5 requests, 2 each, at 70 %
    assert starts <= 10 + 4


@given(
    st.integers(0, 3), st.integers(1, 8), st.integers(1, 8), st.integers(0, 50),
    st.floats(0, 100), st.floats(0, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 3))),
    st.floats(-100, 100),
)  # fmt: skip
def test_whatever_the_figures_the_bounds_hold(
    low: int, high: int, concurrency: int, now: int, mean60: float, mean2: float,
    shape: list[tuple[bool, int]], panic_s: float,
) -> None:  # fmt: skip
    rules = Rules(low, max(low, high), concurrency, 5.0)
    replicas = tuple(
        ReplicaView(f"r{i}", is_ready, running if is_ready else 0, 0.0 if running else 1.0)
        for i, (is_ready, running) in enumerate(shape)
    )
    figures = demand(now, now, mean60, mean2, 0.0 if now else 10.0)
    decision, _ = decide(0.0, rules, Memory(panic_until_s=panic_s), figures, replicas)
    after = len(replicas) + decision.start - len(decision.cancel) - len(decision.drain)
    busy = {view.replica for view in replicas if view.running}
    assert not busy & set(decision.drain)
    assert decision.start == 0 or after <= rules.max
    assert not (decision.start and (decision.cancel or decision.drain))
    assert after >= min(len(replicas), max(rules.min, len(replicas) // 2))


def test_a_held_request_asks_for_places_for_all_that_are_there() -> None:
    assert decide(0.0, RULES, Memory(), demand(7, 3, 0.1, 0.1), ready(2, 2))[0].start == 2
    assert decide(0.0, RULES, Memory(), demand(7, 0, 0.1, 0.1), ready(4, 2))[0].start == 0


@pytest.mark.parametrize(
    ("requests", "present", "missing"), [(1, 0, 1), (2, 1, 0), (3, 1, 1), (100, 4, 6), (3, 9, 0)]
)
def test_what_is_missing_at_the_moment_a_request_is_held(
    requests: int, present: int, missing: int
) -> None:
    assert missing_now(RULES, requests, present) == missing


def test_as_many_as_were_wanted_within_the_hold_are_kept() -> None:
    rules = replace(RULES, hold_s=50.0)
    _, memory = decide(0.0, rules, Memory(), demand(6, 0, 1.0, 6.0), ready(3, 2))
    decision, memory = decide(49.0, rules, memory, demand(2, 0, 1.0, 1.0), ready(3, 0))
    assert (decision.drain, decision.reason) == ((), "as many were wanted within 50 s")
    decision, memory = decide(50.0, rules, memory, demand(2, 0, 1.0, 1.0), ready(3, 0))
    assert len(decision.drain) == 2


@given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 10)), min_size=1, max_size=60))
def test_the_memory_of_peaks_is_their_maximum_over_the_window(
    steps: list[tuple[float, int]],
) -> None:
    rules, memory, now_s, seen = replace(RULES, hold_s=40.0), Memory(), 0.0, []
    for pause_s, wanted in steps:
        now_s += pause_s
        seen.append((now_s, wanted))
        _, memory = decide(now_s, rules, memory, demand(1, 0, 0.0, wanted * 2.0), ready(10, 1))
        recent = [max(1, count) for at_s, count in seen if at_s > now_s - 40.0]
        assert memory.peaks[0][1] == max(recent)


def test_a_buffer_stays_idle_beside_the_busy_ones_while_the_app_is_in_use() -> None:
    rules = replace(RULES, buffer=2)
    assert decide(0.0, rules, Memory(), demand(2, 0, 1.0, 1.0), ready(1, 2))[0].desired == 3
    busy = (*ready(2, 1), *(ReplicaView(f"i{n}", True, 0, 99.0) for n in range(2)))
    assert decide(99.0, rules, Memory(), demand(2, 0, 1.0, 1.0), busy)[0].drain == ()
    assert decide(99.0, rules, Memory(), demand(idle_s=61.0), ready(1))[0].desired == 0


def test_a_replica_is_brought_back_before_a_request_that_is_due_and_not_for_longer() -> None:
    rules = replace(RULES, warm=Warm(100.0, 120.0))
    for idle_s, wanted in ((99.0, 0), (100.0, 1), (119.0, 1), (120.0, 0)):
        assert decide(0.0, rules, Memory(), demand(idle_s=idle_s), ())[0].desired == wanted


def test_the_keep_alive_is_learned_from_pauses() -> None:
    # Most pauses are short: keeping the replica through them is cheaper than a start each.
    assert auto_idle_s(10.0, [30.0] * 20 + [3600.0] * 5) == 30.0
    # Hardly any would be bridged: fold early.
    assert auto_idle_s(2.0, [3600.0] * 20) == 15.0
    assert auto_idle_s(40.0, [3600.0] * 20) == 40.0  # never below the start itself
    assert auto_idle_s(2.0, [30.0] * 7) == 60.0  # too few to know
    assert auto_idle_s(500.0, [890.0] * 10) == 890.0
    assert auto_idle_s(5000.0, [2000.0] * 10) == 900.0


@given(st.lists(st.floats(1, 1e5), max_size=60), st.floats(0.1, 2000))
def test_a_keep_alive_is_within_its_bounds(pauses_s: list[float], start_s: float) -> None:
    assert min(900.0, start_s) <= auto_idle_s(start_s, pauses_s) <= 900.0
    assert hold_s(start_s) <= 900.0
    warm = pre_warm(start_s, pauses_s, 60.0)
    assert warm is None or 60.0 < warm.from_s < warm.until_s


def test_pauses_that_differ_bring_nothing_back() -> None:
    assert pre_warm(5.0, [600.0, 604.0, 601.0, 603.0, 600.0, 602.0], 60.0) == Warm(589.0, 610.0)
    assert pre_warm(5.0, [600.0, 900.0, 601.0, 603.0, 600.0, 602.0], 60.0) is None
    assert pre_warm(5.0, [600.0] * 5, 60.0) is None
    assert pre_warm(5.0, [30.0] * 6, 60.0) is None  # it is kept through them
    assert pre_warm(None, [600.0] * 6, 60.0) is None


def strained(count: int) -> tuple[ReplicaView, ...]:
    return tuple(ReplicaView(f"t{i}", True, 1, is_strained=True) for i in range(count))


def test_replicas_near_what_they_may_use_get_one_beside_them_whatever_the_concurrency_says() -> (
    None
):
    light = demand(1, 0, 0.5, 0.5)
    decision, _ = decide(0.0, RULES, Memory(), light, strained(1))
    assert (decision.start, decision.reason) == (1, "1 near what they may use")
    for beside in (starting(1), ready(1), ready(1, 1)):  # it comes, or is there
        assert decide(0.0, RULES, Memory(), light, strained(1) + beside)[0].start == 0
    assert decide(0.0, RULES, Memory(), light, strained(3))[0].start == 1


def test_one_with_room_stays_beside_them_and_not_more_than_one() -> None:
    views = strained(1) + ready(3)
    decision, _ = decide(1000.0, RULES, Memory(), demand(1, 0, 0.5, 0.5), views)
    assert len(decision.drain) == 2


def test_above_the_maximum_and_without_requests_nothing_is_started_for_them() -> None:
    few = replace(RULES, max=2)
    assert decide(0.0, few, Memory(), demand(1, 0, 0.5, 0.5), strained(2))[0].start == 0
    assert decide(0.0, RULES, Memory(), demand(0, 0, 0.0, 0.0, 5.0), strained(1))[0].start == 0
