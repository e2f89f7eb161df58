"""The course of a day, learned."""

import math

import pytest

from nagara.pool.demandclass import ANY
from nagara.pool.meters import Meters
from nagara.pool.season import DAY_S, Season

HOUR = 3600.0


def taught(days: int, day_s: float = 0.0) -> Season:
    """A season of days whose demand is highest at noon."""
    season = Season(day_s)
    for minute in range(days * 1440):
        at_s = minute * 60.0
        level = 1 + 0.8 * math.cos(2 * math.pi * (at_s / DAY_S - 0.5))
        season.add(round(10 * level), at_s)
    return season


def test_before_a_day_is_over_nothing_is_foretold() -> None:
    season = taught(0)
    assert season.ratio(0.0, 6 * HOUR) == 1.0
    season.add(50, HOUR)
    assert season.ratio(0.0, 6 * HOUR) == 1.0


def test_what_the_clock_says_about_the_next_hours_is_known_after_a_day() -> None:
    season = taught(2)
    now_s = 2 * DAY_S
    assert season.ratio(now_s + 3 * HOUR, now_s + 5 * HOUR) > 1.4
    assert season.ratio(now_s + 17 * HOUR, now_s + 19 * HOUR) < 0.8
    assert season.ratio(now_s + 12 * HOUR, now_s + 12 * HOUR) == 1.0


def test_the_time_of_day_is_the_wall_clocks() -> None:
    here, shifted = taught(2), taught(2, day_s=6 * HOUR)
    now_s = 2 * DAY_S
    assert shifted.ratio(now_s, now_s + HOUR) == pytest.approx(here.ratio(now_s, now_s + HOUR))


def test_a_ratio_is_never_believed_beyond_reason() -> None:
    season = Season()
    for hour in range(48):
        season.add(10_000 if hour % 24 == 12 else 0, hour * HOUR)
    season.advance(2 * DAY_S)
    ratios = [season.ratio(2 * DAY_S, 2 * DAY_S + hour * HOUR) for hour in range(24)]
    assert 0.4 <= min(ratios) <= max(ratios) <= 2.5


def test_it_survives_a_restart_with_the_meters() -> None:
    meters = Meters()
    for minute in range(2 * 1440):
        for _ in range(20 if 8 <= minute / 60 % 24 < 20 else 2):
            meters.claimed(ANY, minute * 60.0)
    now_s = 2 * DAY_S + 8 * HOUR
    ((_, meter),) = meters.all(now_s)
    expected = meters.expected(ANY, meter, 300.0, now_s)
    assert expected > 1.3 * meter.rate() * 5
    later = Meters()
    later.load(meters.to_document(now_s), now_s)
    ((_, meter),) = later.all(now_s)
    assert later.expected(ANY, meter, 300.0, now_s) == pytest.approx(expected, rel=0.05)
