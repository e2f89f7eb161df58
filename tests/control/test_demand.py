"""Demand: one number, its means, and idleness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.control.demand import LONG_S, SHORT_S, DemandWindow


def test_the_mean_is_the_area_over_the_window() -> None:
    window = DemandWindow(0.0)
    window.enter(10.0)
    window.enter(11.0)
    window.leave(12.0)
    window.leave(13.0)
    assert window.mean(LONG_S, 13.0) == pytest.approx(4 / 60)
    assert window.mean(SHORT_S, 13.0) == pytest.approx(1.5)
    assert window.mean(SHORT_S, 20.0) == pytest.approx(0.0)
    assert window.mean(LONG_S, 100.0) == pytest.approx(0.0)


def test_a_request_that_stays_counts_all_the_time() -> None:
    """A long stream ends rarely: a rate of endings would not see it."""
    window = DemandWindow(0.0)
    window.enter(0.0)
    for second in range(1, 200):
        assert window.mean(SHORT_S, second) == pytest.approx(min(1.0, second / 2))
    assert window.mean(LONG_S, 200.0) == pytest.approx(1.0)
    assert window.idle_s(200.0) == 0.0


def test_idleness_begins_with_the_end_of_the_last_request() -> None:
    window = DemandWindow(5.0)
    assert window.idle_s(7.0) == 2.0
    window.enter(7.0)
    window.leave(9.0)
    assert window.idle_s(9.5) == 0.5


def test_memory_is_bounded() -> None:
    window = DemandWindow(0.0)
    for step in range(100_000):
        window.enter(step * 0.01)
        window.leave(step * 0.01 + 0.005)
    assert len(window._samples) <= 1210
    assert window.mean(LONG_S, 1000.0) == pytest.approx(0.5, abs=0.01)


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.booleans()), max_size=60))
def test_it_agrees_with_a_plain_sum(steps: list[tuple[float, bool]]) -> None:
    window, now_s, level = DemandWindow(0.0), 0.0, 0
    pieces: list[tuple[float, float, int]] = []
    for pause_s, is_arrival in steps:
        pieces.append((now_s, now_s + pause_s, level))
        now_s += pause_s
        if is_arrival:
            window.enter(now_s)
            level += 1
        elif level:
            window.leave(now_s)
            level -= 1
    for width_s in (SHORT_S, LONG_S):
        area = sum(
            max(0.0, end_s - max(begin_s, now_s - width_s)) * height
            for begin_s, end_s, height in pieces
        )
        tolerance = 0.1 * max((height for *_, height in pieces), default=0) / width_s + 1e-6
        assert window.mean(width_s, now_s) == pytest.approx(area / width_s, abs=tolerance)
