"""How long a request may wait follows from the starts of the kind that is under way."""

import asyncio
from typing import Any

import pytest

from nagara.contract.replica import StartKind
from nagara.control.app import App
from nagara.control.fleet import Fleet
from nagara.control.recent_starts import RecentStarts, p95
from nagara.control.service import Service
from nagara.testing.clock import JumpingClock


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], 5.0), ([1.0, 2.0], 2.0), ([*range(1, 20)], 19), ([*range(1, 21)], 19), ([3, 1, 2], 3)],
)
def test_p95_is_the_smallest_that_95_percent_do_not_exceed(values: Any, expected: float) -> None:
    assert p95(values) == expected


def test_kinds_are_kept_apart_and_a_restored_start_is_not_slower_than_a_plain_one() -> None:
    starts = RecentStarts()
    assert starts.slow_s(StartKind.PLAIN) is None
    assert starts.slow_s(StartKind.RESTORED) is None
    starts.add(StartKind.PLAIN, 90.0)
    assert starts.slow_s(StartKind.RESTORED) == 90.0  # nobody has seen one yet
    starts.add(StartKind.RESTORED, 1.0)
    assert (starts.slow_s(StartKind.PLAIN), starts.slow_s(StartKind.RESTORED)) == (90.0, 1.0)
    assert starts.last_s == 1.0
    starts.clear()
    starts.add(StartKind.RESTORED, 1.0)
    assert starts.slow_s(StartKind.PLAIN) is None  # after a snapshot was lost: nothing is known


def test_one_slow_start_among_twenty_and_what_is_long_ago_do_not_count() -> None:
    starts = RecentStarts()
    for seconds in (500.0, 400.0, *[2.0] * 19):
        starts.add(StartKind.PLAIN, seconds)
    assert starts.slow_s(StartKind.PLAIN) == 2.0


async def test_the_waiting_time_follows_the_kind_of_start_now_under_way(
    stand: Any, text: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Service] = []

    def add(fleet: Fleet, app: App, version: int) -> Service:
        made.append(really_add(fleet, app, version))
        return made[-1]

    really_add = Fleet.add
    monkeypatch.setattr(Fleet, "add", add)
    await stand.up(text(scale='{idle = "5s"}'))
    script = stand.node.scripts["smol"]
    script.plain_s, script.can_snapshot = 40.0, False

    async def served() -> None:
        request = asyncio.create_task(stand.get("/smol/health"))

        async def is_done() -> bool:
            await stand.clock.advance(1)
            return request.done()

        await until(is_done)
        assert (await request)[0] == 200

    async def folded() -> None:
        async def is_done() -> bool:
            await stand.clock.advance(10)
            return not stand.node.live

        await until(is_done)

    (service,) = made
    assert service.queue_s() == 630.0  # nothing is known: as long as a start may take, and 30 s
    await served()
    assert service.queue_s() == pytest.approx(3 * 40, abs=5)
    script.can_snapshot, script.restored_s = True, 12.0
    await folded()
    await served()
    await until(lambda: service.capture.state == "done")
    assert service.queue_s() == pytest.approx(3 * 40, abs=5)  # no restored start was seen yet
    await folded()
    await served()
    assert service.queue_s() == pytest.approx(3 * 12, abs=5)
