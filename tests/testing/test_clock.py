"""The clock that a test moves."""

import asyncio

from nagara.testing.clock import JumpingClock


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    clock = JumpingClock()
    woken: list[tuple[str, float]] = []
    begin_s = clock.monotonic_s()

    async def sleeper(name: str, pauses: list[float]) -> None:
        for pause_s in pauses:
            await clock.sleep(pause_s)
            woken.append((name, clock.monotonic_s() - begin_s))

    tasks = [
        asyncio.create_task(sleeper("a", [1.0, 1.0, 1.0])),
        asyncio.create_task(sleeper("b", [1.5])),
        asyncio.create_task(sleeper("c", [9.0])),
    ]
    await clock.advance(3.0)
    assert woken == [("a", 1.0), ("b", 1.5), ("a", 2.0), ("a", 3.0)]
    tasks[2].cancel()
    await asyncio.wait(tasks)


async def test_the_wall_clock_jumps_alone() -> None:
    clock = JumpingClock()
    wall_s, monotonic_s = clock.wall_s(), clock.monotonic_s()
    clock.jump_wall(-3600)
    await clock.advance(10)
    assert (clock.wall_s() - wall_s, clock.monotonic_s() - monotonic_s) == (-3590, 10)
