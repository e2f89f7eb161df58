"""Work that comes to its end whoever stops waiting for it."""

import asyncio
import threading

import pytest

from nagara.node.owned_tasks import Leisure, finished, in_thread


async def test_the_result_and_the_error_of_a_task_are_passed_on():
    async def works():
        return 7

    async def fails():
        raise LookupError("x")

    assert await finished(asyncio.create_task(works())) == 7
    with pytest.raises(LookupError):
        await finished(asyncio.create_task(fails()))


@pytest.mark.parametrize("times", [1, 3])
async def test_a_waiter_that_is_cancelled_still_waits_for_the_end(times):
    end = asyncio.Event()

    async def work():
        await end.wait()
        raise LookupError("heard by nobody, and no warning either")

    task = asyncio.create_task(work())
    waiter = asyncio.create_task(finished(task))
    for _ in range(times):
        await asyncio.sleep(0)
        waiter.cancel()
    await asyncio.sleep(0.01)
    assert not waiter.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert task.done()


async def test_a_thread_is_waited_for_also_when_its_waiter_is_cancelled():
    begun, end, order = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        end.wait(10)
        order.append("work")

    waiter = asyncio.create_task(in_thread(work))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    waiter.cancel()
    asyncio.get_running_loop().call_later(0.05, end.set)
    with pytest.raises(asyncio.CancelledError):
        await waiter
    order.append("waiter")
    assert order == ["work", "waiter"]


async def test_work_at_leisure_waits_and_is_done_at_once_when_its_owner_ends():
    done = []
    leisure = Leisure()
    leisure.begin(lambda: done.append("later"), 3600.0)
    leisure.begin(lambda: done.append("now"))
    async with asyncio.timeout(60):
        while not done:
            await asyncio.sleep(0.01)
        assert done == ["now"]
        await leisure.ended()
    assert done == ["now", "later"]
