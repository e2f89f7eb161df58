"""The real pool in a simulated world: core, meters, sizing, planner and steadiness of releases.

Only the providers, the machines and the clock are simulated. One step a minute for planning and
the provider's lists; claims, ends of leases and ends of checks happen when they happen.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nagara.contract.machine import Offering
from nagara.pool.actions import Check, Granted, Launch, Release
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import PlanError
from nagara.pool.fairness import Claimant
from nagara.pool.greedy import greedy_plan
from nagara.pool.ledger import MemoryLedger
from nagara.pool.meters import Meters
from nagara.pool.planner import Solver, make_plan
from nagara.pool.problem import Plan, Problem
from nagara.pool.runner import Steadiness
from nagara.pool.simulate.claims import Claim
from nagara.pool.simulate.market import World
from nagara.pool.simulate.result import CHECK_S, Result, Sample
from nagara.pool.sizing import PLAN_EVERY_S, Policy, make_problem
from nagara.pool.states import IN_FLIGHT, MachineEvent

if TYPE_CHECKING:
    from nagara.contract.replica import Lease

WANTED = DemandClass(frozenset({"h100"}))
Progress = Callable[[float], None]


class SharedPool:
    """One run.

    Args:
        warm_up_s: claims before this time are not counted: a pool begins empty.
    """

    def __init__(
        self,
        world: World,
        solver: Solver,
        policy: Policy,
        warm_up_s: float,
        *,
        name: str = "planned_shared",
    ) -> None:
        self.result = Result(name)
        self._world = world
        self._solver = solver
        self._policy = policy
        self._warm_up_s = warm_up_s
        numbers = itertools.count()
        self._ledger = MemoryLedger()
        self._core = PoolCore(self._ledger.read(), lambda: f"n0-{next(numbers)}", 0.0)
        self._meters = Meters()
        self._steady = Steadiness()
        self._ends: list[tuple[float, int, Lease, float]] = []
        self._checks: list[tuple[float, int, Check, str]] = []
        self._order = itertools.count()
        self._waiting: deque[Claim] = deque()
        self._base = (0.0, 0.0)
        self._target = 0.0
        self._since = [0, 0]

    def run(self, claims: list[Claim], until_s: float, progress: Progress) -> Result:
        """All of it."""
        coming = iter(claims)
        claim = next(coming, None)
        step_s = 0.0
        while step_s < until_s:
            self._step(step_s)
            if step_s % 21_600 == 0:
                progress(step_s / until_s)
            step_s += PLAN_EVERY_S
            while True:
                ends_s = self._ends[0][0] if self._ends else step_s
                checked_s = self._checks[0][0] if self._checks else step_s
                claim_s = claim.at_s if claim is not None else step_s
                now_s = min(ends_s, checked_s, claim_s)
                if now_s >= step_s:
                    break
                if claim is not None and claim_s == now_s:
                    self._claim(claim)
                    claim = next(coming, None)
                elif ends_s == now_s:
                    self._end(now_s)
                else:
                    self._checked(now_s)
        self._finish(until_s)
        return self.result

    def _finish(self, until_s: float) -> None:
        self._world.advance(until_s)
        for ends_s, _, _, from_s in self._ends:
            self._count_held(from_s, min(ends_s, until_s))
        self.result.never_served = len(self._waiting)
        self.result.cost = self._world.cost - self._base[0]
        self.result.paid_hours = self._world.paid_hours - self._base[1]

    # -- claims ----------------------------------------------------------------------------

    def _claim(self, claim: Claim) -> None:
        self._meters.claimed(WANTED, claim.at_s)
        is_counted = claim.at_s >= self._warm_up_s
        self.result.claims += is_counted
        self._since[0] += 1
        if not self._waiting and self._try(claim, claim.at_s):
            self.result.served_at_once += is_counted
        else:
            self._since[1] += 1
            self._waiting.append(claim)

    def _try(self, claim: Claim, now_s: float) -> bool:
        granted = self._core.claim(Claimant(f"app-{claim.app}"), WANTED, now_s)
        if not isinstance(granted, Granted):
            return False
        end = (now_s + claim.hold_s, next(self._order), granted.lease, now_s)
        heapq.heappush(self._ends, end)
        return True

    def _serve_waiting(self, now_s: float) -> None:
        while self._waiting and self._core.grants.inventory.free_slots:
            if not self._try(self._waiting[0], now_s):
                break
            claim = self._waiting.popleft()
            if claim.at_s >= self._warm_up_s:
                self.result.waited_s.append(now_s - claim.at_s)

    def _end(self, now_s: float) -> None:
        _, _, lease, from_s = heapq.heappop(self._ends)
        self._count_held(from_s, now_s)
        self._meters.returned(WANTED, now_s)
        self._core.give_back(lease, now_s, is_confirmed=True)
        self._serve_waiting(now_s)

    def _count_held(self, from_s: float, to_s: float) -> None:
        self.result.held_hours += max(0.0, to_s - max(from_s, self._warm_up_s)) / 3600

    def _checked(self, now_s: float) -> None:
        _, _, check, provider = heapq.heappop(self._checks)
        is_bad = self._world.is_bad(check.name, provider)
        self._core.checked(check, now_s, "a simulated fault" if is_bad else None)
        self._carry_out(now_s)
        self._serve_waiting(now_s)

    # -- planning --------------------------------------------------------------------------

    def _step(self, now_s: float) -> None:
        self._world.advance(now_s)
        if now_s == self._warm_up_s:
            self._base = (self._world.cost, self._world.paid_hours)
        offerings = self._world.offerings()
        by_id = {offering.id: offering for offering in offerings}
        for provider in self._world.markets:
            listing = self._world.listing(provider)
            self._core.listed(provider, listing, by_id, now_s, now_s)
        self._core.tick(now_s)
        self._carry_out(now_s)
        self._core.take_lost()
        plan = self._plan(offerings, now_s)
        for name, count in plan.launches:
            for _ in range(count):
                self._core.request(by_id[name], now_s)
        for name, count in self._steady.releases(plan):
            for machine in self._core.grants.inventory.idle(name)[:count]:
                self._core.drain(machine.name, MachineEvent.RELEASE, "not needed", now_s)
        self._carry_out(now_s)
        self._sample(now_s)

    def _plan(self, offerings: tuple[Offering, ...], now_s: float) -> Plan:
        problem = make_problem(self._core, offerings, self._meters, self._policy, now_s)
        self._target = _machines_wanted(problem)
        self.result.solves += 1
        try:
            return make_plan(problem, self._solver)
        except PlanError as error:
            return greedy_plan(problem, error.what)

    def _carry_out(self, now_s: float) -> None:
        self._ledger.write(self._core.take_writes())
        for action in self._core.take_actions():
            if isinstance(action, Launch):
                if self._world.launch(action.name, action.offering):
                    self._core.accepted(action, now_s)
                else:
                    self._core.refused(action, "no such machine at present", now_s)
            elif isinstance(action, Release):
                self._world.release(action.name, action.provider)
                self._core.released(action, now_s)
            else:
                machine = self._core.table.named(action.name)
                provider = machine.offering.provider
                entry = (now_s + CHECK_S, next(self._order), action, provider)
                heapq.heappush(self._checks, entry)

    def _sample(self, now_s: float) -> None:
        states = [machine.state for machine in self._core.table]
        free = self._core.grants.inventory.free_slots
        held = len(self._ends)
        claims, misses = self._since
        self._since = [0, 0]
        self.result.samples.append(
            Sample(
                now_s, free + held, free, held, sum(state in IN_FLIGHT for state in states),
                self._target, claims, misses,
            )
        )  # fmt: skip


def _machines_wanted(problem: Problem) -> float:
    if not problem.demands:
        return 0.0
    return sum(demand.quantity for demand in problem.demands) / problem.rules.utilisation
