"""Queue and credits, without HTTP."""

import asyncio
from typing import Any, cast

import pytest

from nagara.base.clock import SystemClock
from nagara.control.dispatch import Dispatcher, Endpoint, Grant
from nagara.control.refusal import Refusal


def endpoint(name: str, capacity: int = 1, ready_s: float = 0.0) -> Endpoint:
    return Endpoint(name, cast("Any", None), capacity, ready_s, start_s=3.0)


def dispatcher(refusal: Refusal | None = None, queue_s: float = 5.0, **bounds: Any) -> Dispatcher:
    return Dispatcher(SystemClock(), lambda: refusal, lambda: queue_s, **bounds)


def acquire(queue: Dispatcher, size_bytes: int = 0, **more: Any) -> "asyncio.Task[Grant]":
    now_s = SystemClock().monotonic_s()
    return asyncio.create_task(queue.acquire(size_bytes, arrived_s=now_s, **more))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_served_in_the_order_they_came() -> None:
    queue = dispatcher()
    tasks = [acquire(queue) for _ in range(4)]
    await settled()
    one = endpoint("one")
    queue.add(one)
    for task in tasks:
        await settled()
        assert [other.done() for other in tasks].count(True) == tasks.index(task) + 1
        queue.release((await task).endpoint)
    assert one.running == queue.held == 0


async def test_a_repeated_request_goes_first() -> None:
    queue = dispatcher()
    first = acquire(queue)
    await settled()
    again = acquire(queue, is_retry=True)
    await settled()
    queue.add(endpoint("one"))
    await settled()
    assert (again.done(), first.done()) == (True, False)
    first.cancel()


async def test_the_least_busy_replica_is_chosen() -> None:
    queue = dispatcher()
    one, two = endpoint("one", 4), endpoint("two", 4)
    queue.add(one)
    queue.add(two)
    for _ in range(8):
        await acquire(queue)
    assert (one.running, two.running) == (4, 4)


async def test_a_credit_granted_to_a_request_that_leaves_is_given_back() -> None:
    queue = dispatcher()
    leaving = acquire(queue)
    staying = acquire(queue)
    await settled()
    one = endpoint("one")
    queue.add(one)
    leaving.cancel()  # in the same turn of the loop in which it was granted
    with pytest.raises(asyncio.CancelledError):
        await leaving
    grant = await staying
    assert one.running == 1
    queue.release(grant.endpoint)
    assert (one.running, queue.held) == (0, 0)


async def test_no_request_reaches_a_removed_replica() -> None:
    queue = dispatcher()
    one = endpoint("one", 2)
    queue.add(one)
    grant = await acquire(queue)
    queue.remove("one")
    waiting = acquire(queue)
    await settled()
    queue.release(grant.endpoint)
    await asyncio.wait_for(one.drained(), 1)
    assert not waiting.done()
    waiting.cancel()


async def test_bounds_in_number_and_bytes() -> None:
    queue = dispatcher(max_held=2, max_held_bytes=100)
    tasks = [acquire(queue, 60)]
    await settled()
    for size_bytes, is_full in ((50, True), (40, False), (0, True)):
        task = acquire(queue, size_bytes)
        await settled()
        if is_full:
            with pytest.raises(Refusal) as caught:
                await task
            assert caught.value.status == 429
        else:
            tasks.append(task)
    for task in tasks:
        task.cancel()
    await settled()
    assert queue.held == 0


async def test_a_deadline_passes_and_the_queue_goes_on() -> None:
    queue = dispatcher(queue_s=0.02)
    with pytest.raises(Refusal) as caught:
        await acquire(queue)
    assert caught.value.status == 503
    queue.add(endpoint("one"))
    assert (await acquire(queue)).endpoint.replica == "one"


async def test_cold_start_time_is_told_only_to_those_who_waited_for_it() -> None:
    queue = dispatcher()
    waiting = acquire(queue)
    await settled()
    queue.add(endpoint("one", 2, ready_s=SystemClock().monotonic_s()))
    assert (await waiting).cold_start_s == 3.0
    assert (await acquire(queue)).cold_start_s == 0.0


async def test_refused_and_closed() -> None:
    with pytest.raises(Refusal, match="no way"):
        await acquire(dispatcher(Refusal(503, "no way", code="x")))
    queue = dispatcher()
    waiting = acquire(queue)
    await settled()
    queue.close(Refusal(404, "deleted", code="x"))
    for task in (waiting, acquire(queue)):
        with pytest.raises(Refusal, match="deleted"):
            await task
    assert queue.held == 0
