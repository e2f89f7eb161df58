"""Working hours: cron's fields, and how many replicas a schedule keeps at a moment."""

import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.base.errors import UsageError
from nagara.control.cron import Entry, parse_cron, scheduled
from nagara.testing.clock import JumpingClock

HOURS = (Entry("0 8 * * 1-5", 2), Entry("0 18 * * *", 0))


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("cron", "moment", "last"),
    [
        ("0 8 * * 1-5", "2026-11-30 08:00", "2026-11-30 08:00"),  # a Monday
        ("0 8 * * 1-5", "2026-11-30 07:59", "2026-11-27 08:00"),
        ("*/15 * * * *", "2026-11-30 10:44:59", "2026-11-30 10:30"),
        ("5,35 9-17/4 * * *", "2026-11-30 16:00", "2026-11-30 13:35"),
        ("0 0 1 1 *", "2026-11-30 00:00", "2026-01-01 00:00"),
        ("0 0 * * 7", "2026-11-30 00:00", "2026-11-29 00:00"),
        ("0 0 * * 0", "2026-11-30 00:00", "2026-11-29 00:00"),
        ("0 0 13 * 5", "2026-11-30 00:00", "2026-11-27 00:00"),  # the 13th or a Friday
        ("30/10 8 * * *", "2026-11-30 08:55", "2026-11-30 08:50"),
        ("0 0 29 2 *", "2026-11-30 00:00", None),
    ],
)
def test_the_latest_time_that_fits(cron: str, moment: str, last: str | None) -> None:
    assert parse_cron(cron).last(at(moment)) == (None if last is None else at(last))


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "a * * * *",
     "1-a * * * *", "5-1 * * * *", "*/0 * * * *", "*/x * * * *", "-1 * * * *", "1,,2 * * * *"],
)  # fmt: skip
def test_what_is_no_time_is_refused(cron: str) -> None:
    with pytest.raises(UsageError):
        parse_cron(cron)


@given(st.integers(0, 59), st.integers(0, 23), st.integers(0, 366 * 1440))
def test_a_daily_time_is_never_longer_ago_than_a_day(minute: int, hour: int, after: int) -> None:
    moment = at("2026-01-01 00:00") + timedelta(minutes=after)
    last = parse_cron(f"{minute} {hour} * * *").last(moment)
    assert last is not None
    assert timedelta() <= moment - last < timedelta(days=1)
    assert (last.hour, last.minute) == (hour, minute)


@pytest.mark.parametrize(
    ("moment", "warm"),
    [("2026-11-30 07:59", 0), ("2026-11-30 08:00", 2), ("2026-11-30 17:59", 2),
     ("2026-11-30 18:00", 0), ("2026-11-29 12:00", 0)],
)  # fmt: skip
def test_the_latest_entry_counts(moment: str, warm: int) -> None:
    assert scheduled(HOURS, at(moment)) == warm


def test_without_entries_nothing_is_kept() -> None:
    assert scheduled((), at("2026-11-30 12:00")) == 0


@pytest.mark.parametrize(
    "clock", [JumpingClock(wall_s=time.mktime((2026, 11, 30, 7, 59, 30, 0, 0, 0)))]
)
async def test_replicas_are_there_at_the_beginning_of_the_hours_and_go_at_their_end(
    stand: Any, text: Any, until: Any
) -> None:
    schedule = '[{cron = "0 8 * * *", warm = 2}, {cron = "10 8 * * *", warm = 0}]'
    await stand.up(text(schedule=schedule, scale='{idle = "10s"}'))
    await stand.clock.advance(20)
    assert not stand.node.live
    await stand.clock.advance(20)
    await until(lambda: len(stand.node.live) == 2)
    await stand.clock.advance(400)
    assert len(stand.node.live) == 2
    await stand.clock.advance(500)
    await until(lambda: not stand.node.live)
