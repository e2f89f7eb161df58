"""Times as cron writes them, and what an app's schedule wants at a moment. Pure.

Five fields: minute, hour, day of the month, month, day of the week (0 to 7, Sunday is 0 and 7). In
each `*`, numbers, ranges `a-b`, steps `*/n` and `a-b/n`, and lists of these. As in cron, a time
whose day of the month and day of the week are both restricted fits on either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from nagara.base.errors import UsageError

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
_BACK_DAYS = 366


@dataclass(frozen=True, slots=True)
class Cron:
    """The values that each field allows."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # Sunday is 0
    is_either: bool  # day of the month or of the week

    def last(self, at: datetime) -> datetime | None:
        """The latest time that fits, at or before a moment; None if none does within a year."""
        for back in range(_BACK_DAYS + 1):
            day = at.date() - timedelta(days=back)
            weekday = day.isoweekday() % 7
            in_month, in_week = day.day in self.days, weekday in self.weekdays
            is_day = (in_month or in_week) if self.is_either else (in_month and in_week)
            if day.month not in self.months or not is_day:
                continue
            for hour in sorted(self.hours, reverse=True):
                for minute in sorted(self.minutes, reverse=True):
                    if back or (hour, minute) <= (at.hour, at.minute):
                        return datetime(day.year, day.month, day.day, hour, minute)  # noqa: DTZ001
        return None


@dataclass(frozen=True, slots=True)
class Entry:
    """From each time that fits `cron` on, `warm` replicas are kept."""

    cron: str
    warm: int


@lru_cache(maxsize=1024)
def parse_cron(text: str) -> Cron:
    """The five fields.

    Raises:
        UsageError: naming the field that is wrong.
    """
    parts = text.split()
    if len(parts) != len(_FIELDS):
        raise UsageError(
            f"{text!r} has {len(parts)} fields instead of 5",
            hint="minute hour day month weekday, such as 0 8 * * 1-5",
        )
    found = [_field(part, *rule) for part, rule in zip(parts, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = found
    is_either = not parts[2].startswith("*") and not parts[4].startswith("*")
    return Cron(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), is_either)


def _field(text: str, name: str, low: int, high: int) -> frozenset[int]:
    values: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            begin, end = low, high
        elif first.isdigit() and (last.isdigit() if dash else True):
            begin = int(first)
            end = int(last) if dash else (high if slash else begin)
        else:
            raise UsageError(f"{text!r} is no {name}")
        if slash and not (step.isdigit() and int(step) > 0):
            raise UsageError(f"{text!r} is no {name}")
        if not low <= begin <= end <= high:
            raise UsageError(f"{text!r} is no {name}: {low} to {high}")
        values.update(range(begin, end + 1, int(step) if slash else 1))
    return frozenset(values)


def scheduled(entries: Sequence[Entry], at: datetime) -> int:
    """How many replicas the schedule keeps at a moment: what its latest entry says; 0 before any.

    Of entries for the same time the one that stands last counts.
    """
    latest: datetime | None = None
    warm = 0
    for entry in entries:
        began = parse_cron(entry.cron).last(at)
        if began is not None and (latest is None or began >= latest):
            latest, warm = began, entry.warm
    return warm
