"""The other ways to hold a reserve, in the same world: a fixed number, and one per app.

Both ask the cheapest offering first and go on to the next when it is refused, learn nothing from
refusals, and give back the dearest idle machine first. Each has one number, tuned over a grid.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nagara.contract.machine import Offering
from nagara.pool.buffer import reserve
from nagara.pool.simulate.claims import Claim
from nagara.pool.simulate.market import World
from nagara.pool.simulate.result import CHECK_S, Result
from nagara.pool.sizing import PLAN_EVERY_S

Target = Callable[[int], int]  # spares wanted, by the number of the reserve
GIVE_UP_S = 1200.0  # a machine that has not come up by then


def fixed_target(spares: int) -> Target:
    """The same number, always."""
    return lambda _: spares


def sized_target(
    rates_s: list[float], dispersion: float, service: float, refill_s: float
) -> Target:
    """For every app the reserve that its own mean rate asks for: never less than one."""
    sizes = [max(1, round(reserve(rate * refill_s, dispersion, service))) for rate in rates_s]
    return lambda number: sizes[number]


@dataclass(slots=True)
class _Reserve:
    """One pool of interchangeable machines."""

    free: list[tuple[float, str, str]] = field(default_factory=list)  # (price, name, provider)
    held: int = 0
    coming: int = 0
    waiting: deque[Claim] = field(default_factory=deque)


class Reserves:
    """One run of a rival.

    Args:
        count: 1 for a shared reserve, one per app otherwise.
        target: how many spares each reserve holds, free and on their way.
    """

    def __init__(
        self, name: str, world: World, count: int, target: Target, warm_up_s: float
    ) -> None:
        self.result = Result(name)
        self._world = world
        self._target = target
        self._warm_up_s = warm_up_s
        self._reserves = [_Reserve() for _ in range(count)]
        self._names = itertools.count()
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, str, str, float]] = []
        self._begun: dict[tuple[str, str], float] = {}
        self._changed: set[int] = set(range(count))
        self._base = (0.0, 0.0)

    def run(self, claims: list[Claim], until_s: float) -> Result:
        """All of it."""
        coming = iter(claims)
        claim = next(coming, None)
        step_s = 0.0
        while step_s < until_s:
            self._step(step_s)
            step_s += PLAN_EVERY_S
            while True:
                event_s = self._events[0][0] if self._events else step_s
                claim_s = claim.at_s if claim is not None else step_s
                if min(event_s, claim_s) >= step_s:
                    break
                if claim is not None and claim_s <= event_s:
                    self._claim(claim)
                    claim = next(coming, None)
                else:
                    self._event()
        self._world.advance(until_s)
        for from_s in self._begun.values():
            self._count_held(from_s, until_s)
        result = self.result
        result.never_served = sum(len(one.waiting) for one in self._reserves)
        result.cost = self._world.cost - self._base[0]
        result.paid_hours = self._world.paid_hours - self._base[1]
        return result

    def _of(self, claim: Claim) -> int:
        return claim.app if len(self._reserves) > 1 else 0

    def _claim(self, claim: Claim) -> None:
        number = self._of(claim)
        is_counted = claim.at_s >= self._warm_up_s
        self.result.claims += is_counted
        if self._reserves[number].free:
            self._serve(number, claim, claim.at_s)
            self.result.served_at_once += is_counted
        else:
            self._reserves[number].waiting.append(claim)
        self._changed.add(number)

    def _serve(self, number: int, claim: Claim, now_s: float) -> None:
        reserve_ = self._reserves[number]
        price_h, name, provider = heapq.heappop(reserve_.free)
        reserve_.held += 1
        self._begun[name, provider] = now_s
        self._push(now_s + claim.hold_s, number, name, provider, price_h)

    def _push(self, at_s: float, number: int, name: str, provider: str, price_h: float) -> None:
        event = (at_s, next(self._order), number, name, provider, price_h)
        heapq.heappush(self._events, event)

    def _event(self) -> None:
        """A lease ends, or a machine has come up (or has not)."""
        now_s, _, number, name, provider, price_h = heapq.heappop(self._events)
        one = self._reserves[number]
        self._changed.add(number)
        begun_s = self._begun.pop((name, provider), None)
        if begun_s is not None:
            one.held -= 1
            self._count_held(begun_s, now_s)
        else:
            one.coming -= 1
            machine = self._world.markets[provider].machines.get(name)
            if machine is None or machine.is_bad or machine.up_s > now_s:
                self._world.release(name, provider)
                return
        heapq.heappush(one.free, (price_h, name, provider))
        if one.waiting:
            claim = one.waiting.popleft()
            if claim.at_s >= self._warm_up_s:
                self.result.waited_s.append(now_s - claim.at_s)
            self._serve(number, claim, now_s)

    def _count_held(self, from_s: float, to_s: float) -> None:
        self.result.held_hours += max(0.0, to_s - max(from_s, self._warm_up_s)) / 3600

    def _step(self, now_s: float) -> None:
        self._world.advance(now_s)
        if now_s == self._warm_up_s:
            self._base = (self._world.cost, self._world.paid_hours)
        if not self._changed:
            return
        by_price = sorted(self._world.offerings(), key=lambda one: (one.price_h, one.id))
        still_short = set()
        for number in sorted(self._changed):
            one = self._reserves[number]
            missing = self._target(number) + len(one.waiting) - len(one.free) - one.coming
            while missing < 0 and one.free:
                dearest = max(one.free)
                one.free.remove(dearest)
                self._world.release(dearest[1], dearest[2])
                missing += 1
            heapq.heapify(one.free)
            if missing > 0 and self._launch(number, missing, by_price, now_s):
                still_short.add(number)
        self._changed = still_short

    def _launch(self, number: int, missing: int, by_price: list[Offering], now_s: float) -> bool:
        """True if nobody had enough."""
        for offering in by_price:
            market = self._world.markets[offering.provider]
            while missing > 0:
                name = f"r-{next(self._names)}"
                if not self._world.launch(name, offering):
                    break
                up_s = market.machines[name].up_s
                ready_s = min(up_s, now_s + GIVE_UP_S) + CHECK_S
                self._push(ready_s, number, name, offering.provider, offering.price_h)
                self._reserves[number].coming += 1
                missing -= 1
        return missing > 0
