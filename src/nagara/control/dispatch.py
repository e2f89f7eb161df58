"""Which replica answers which request of one app, and who has to wait.

A request is given to a replica only when that replica has a free credit (late binding): until
then it is held in one first-in-first-out queue, bounded in number and bytes, each with a
deadline. A credit is taken and given back here and nowhere else, so the number of running
requests is exact at every moment. Knows nothing of HTTP. All methods are called on the loop; all
but `acquire` are synchronous.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nagara.base.clock import Clock
from nagara.control.demand import DemandWindow
from nagara.control.refusal import Refusal
from nagara.control.tracing import Started
from nagara.control.upstream import Upstream

MAX_HELD = 1000
MAX_HELD_BYTES = 64 * 2**20
PROVEN_S = 30.0
AWAY_RETRY_S = 0.25
AWAY_S = 20.0


class Endpoint:
    """One routed replica: its credits and the connections to it.

    Args:
        turned: told True when the first request is given to it, False when its last has ended.
        started: its start, for the traces of requests that waited for it.
    """

    def __init__(
        self,
        replica: str,
        upstream: Upstream,
        capacity: int,
        ready_s: float,
        start_s: float,
        *,
        turned: Callable[[bool], None] = lambda _: None,
        started: Started | None = None,
    ) -> None:
        self.replica = replica
        self.upstream = upstream
        self.capacity = capacity
        self.running = 0
        self.ready_s = ready_s  # monotonic, when it was routed
        self.start_s = start_s  # how long its start took
        self.idle_since_s = ready_s
        self.started = started
        self._turned = turned
        self.has_answered = False  # at least one request to its end; set by the gateway
        self.away_since_s: float | None = None  # its machine's agent has not answered since
        self.is_away = False  # it is not asked for a moment
        self._drained = asyncio.Event()
        self._is_open = True

    def close(self) -> None:
        """No further request is given to it."""
        self._is_open = False
        if self.running == 0:
            self._drained.set()

    def cut(self) -> None:
        """Ends the waiting in `drained` although requests still run."""
        self._drained.set()

    async def drained(self) -> None:
        """Returns when it is closed and its last request has ended, or was cut off."""
        await self._drained.wait()

    def has_proven(self, now_s: float) -> bool:
        """Whether it shows that the app can run: by an answer, or by `PROVEN_S` of life."""
        return self.has_answered or now_s - self.ready_s >= PROVEN_S

    def has_credit(self) -> bool:
        """Whether another request may be given to it."""
        return self._is_open and not self.is_away and self.running < self.capacity

    def take(self) -> None:
        """A request is given to it."""
        self.running += 1
        if self.running == 1:
            self._turned(True)

    def give_back(self, now_s: float) -> None:
        """One of its requests has ended."""
        self.running -= 1
        if self.running == 0:
            self.idle_since_s = now_s
            self._turned(False)
            if not self._is_open:
                self._drained.set()


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to send one request to one replica."""

    endpoint: Endpoint
    queue_s: float  # from arrival to this grant
    cold_start_s: float  # the start this request waited for; 0 if the replica was there


@dataclass(slots=True, eq=False)
class _Held:
    endpoint: asyncio.Future[Endpoint]
    arrived_s: float


class Dispatcher:
    """The queue and the credits of one app.

    Args:
        clock: for demand and waiting times.
        want: called when a request is about to be held; asks for a replica if none is coming.
            Returns the refusal to answer with when none can come.
        queue_s: seconds a request may be held at most.
        failed: why the app's last start failed, for those who waited in vain; empty if it did not.
    """

    def __init__(
        self,
        clock: Clock,
        want: Callable[[], Refusal | None],
        queue_s: Callable[[], float],
        failed: Callable[[], str] = str,
        *,
        max_held: int = MAX_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.demand = DemandWindow(clock.monotonic_s())
        self._clock = clock
        self._want = want
        self._queue_s = queue_s
        self._failed = failed
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._queue: deque[_Held] = deque()  # may contain requests that are done already
        self._held = 0
        self._held_bytes = 0
        self._endpoints: dict[str, Endpoint] = {}
        self._closed: Refusal | None = None

    @property
    def held(self) -> int:
        """Requests waiting for a credit."""
        return self._held

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The routed replicas by name; not to be changed by the caller."""
        return self._endpoints

    async def acquire(self, size_bytes: int, *, arrived_s: float, is_retry: bool = False) -> Grant:
        """Waits for a credit. The caller gives it back with `release`.

        Args:
            size_bytes: what holding this request costs in memory.
            arrived_s: when the request came, monotonic.
            is_retry: it had a credit before and goes to the head of the queue.

        Raises:
            Refusal: 429 queue full, 503 deadline or no replica can come.
        """
        if self._closed is not None:
            raise self._closed
        endpoint = self._pick() if self._held == 0 else None
        if endpoint is None:
            endpoint = await self._hold(size_bytes, arrived_s, is_retry=is_retry)
        else:
            endpoint.take()
        cold_s = endpoint.start_s if endpoint.ready_s > arrived_s else 0.0
        return Grant(endpoint, self._clock.monotonic_s() - arrived_s, cold_s)

    def release(self, endpoint: Endpoint) -> None:
        """The request with a credit of `endpoint` has ended."""
        endpoint.give_back(self._clock.monotonic_s())
        self._hand_out()

    def pause(self, endpoint: Endpoint) -> bool:
        """Its machine's agent does not answer: others are asked first, and it again in a moment.

        False if that has been so for too long. An agent that is being started again must cost
        neither the replica nor a request.
        """
        now_s = self._clock.monotonic_s()
        if endpoint.away_since_s is None:
            endpoint.away_since_s = now_s
        if now_s - endpoint.away_since_s > AWAY_S:
            return False
        if not endpoint.is_away:
            endpoint.is_away = True
            asyncio.get_running_loop().call_later(AWAY_RETRY_S, self._ask_again, endpoint)
        return True

    def _ask_again(self, endpoint: Endpoint) -> None:
        endpoint.is_away = False
        self._hand_out()

    def add(self, endpoint: Endpoint) -> None:
        """Routes a replica and gives it as many held requests as it has credits."""
        self._endpoints[endpoint.replica] = endpoint
        self._hand_out()

    def remove(self, replica: str) -> Endpoint | None:
        """Takes a replica's route away. From the return on, no request reaches it any more."""
        endpoint = self._endpoints.pop(replica, None)
        if endpoint is not None:
            endpoint.close()
        return endpoint

    def set_capacity(self, capacity: int) -> None:
        """Changes the credits of every routed replica."""
        for endpoint in self._endpoints.values():
            endpoint.capacity = capacity
        self._hand_out()

    def refuse_held(self, refusal: Refusal) -> None:
        """Answers every held request with `refusal`."""
        while self._queue:
            held = self._queue.popleft()
            if not held.endpoint.done():
                held.endpoint.set_exception(refusal)

    def close(self, refusal: Refusal) -> None:
        """Answers every held and every later request with `refusal`."""
        self._closed = refusal
        self.refuse_held(refusal)

    async def _hold(self, size_bytes: int, arrived_s: float, *, is_retry: bool) -> Endpoint:
        if self._held >= self._max_held or self._held_bytes + size_bytes > self._max_held_bytes:
            raise Refusal(
                429, f"{self._held} requests are waiting already", code="queue_full",
                retry_after_s=1.0,
            )  # fmt: skip
        refusal = self._want()
        if refusal is not None:
            raise refusal
        loop = asyncio.get_running_loop()
        held = _Held(loop.create_future(), arrived_s)
        if is_retry:
            self._queue.appendleft(held)
        else:
            self._queue.append(held)
        self._held += 1
        self._held_bytes += size_bytes
        left_s = self._queue_s() - (self._clock.monotonic_s() - arrived_s)
        deadline = loop.call_later(max(0.0, left_s), self._expire, held)
        try:
            return await held.endpoint
        except asyncio.CancelledError:
            # The client has gone; a credit may have been granted in the same turn of the loop.
            future = held.endpoint
            if future.done() and not future.cancelled() and future.exception() is None:
                loop.call_soon(self.release, future.result())
            raise
        finally:
            deadline.cancel()
            self._held -= 1
            self._held_bytes -= size_bytes

    def _expire(self, held: _Held) -> None:
        if not held.endpoint.done():
            waited_s = self._clock.monotonic_s() - held.arrived_s
            message = f"no replica was free within {waited_s:.1f} s"
            if reason := self._failed():
                message += f"; the last start failed: {reason}"
            refusal = Refusal(503, message, code="queue_timeout", retry_after_s=5.0)
            held.endpoint.set_exception(refusal)

    def _pick(self) -> Endpoint | None:
        """The routed replica with the fewest requests among those with a free credit."""
        free = [endpoint for endpoint in self._endpoints.values() if endpoint.has_credit()]
        return min(free, key=lambda endpoint: endpoint.running) if free else None

    def _hand_out(self) -> None:
        while self._queue:
            if self._queue[0].endpoint.done():
                self._queue.popleft()
                continue
            endpoint = self._pick()
            if endpoint is None:
                return
            endpoint.take()
            self._queue.popleft().endpoint.set_result(endpoint)
