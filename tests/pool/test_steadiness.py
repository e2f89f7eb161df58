"""Plan after plan for the same demand: what is there stays."""

import pytest

from nagara.contract.machine import Offering
from nagara.pool.demandclass import ANY
from nagara.pool.meters import Meters
from nagara.pool.planner import make_plan
from nagara.pool.runner import Steadiness
from nagara.pool.sizing import Policy, make_problem
from nagara.pool.solver import solve
from nagara.pool.states import MachineEvent, MachineState
from nagara.testing.pools import a_core, an_offering, make_ready

WARM_UP, ROUNDS = 40, 100


def offerings(number: int) -> list[Offering]:
    """Two regions whose prices take turns at being one per cent lower."""
    return [
        an_offering("a", region="eu-1", price_h=1.0 + 0.01 * (number % 2)),
        an_offering("b", region="eu-2", price_h=1.0 + 0.01 * ((number + 1) % 2)),
        an_offering("c", region="eu-1", type="a100", price_h=1.005),
    ]


class Loop:
    """What the service does once a minute, with machines that come up at once."""

    def __init__(self) -> None:
        self.core = a_core()
        self.meters, self.steady = Meters(), Steadiness()
        self.now_s, self.launched, self.released = 0.0, 0, 0

    def round(self, number: int, least_free: int) -> None:
        self.now_s += 60.0
        self.core.tick(self.now_s)
        policy = Policy(least_free=least_free, spare_machines=1)
        kinds = {one.id: one for one in offerings(number)}
        self.meters.claimed(ANY, self.now_s)
        problem = make_problem(self.core, kinds.values(), self.meters, policy, self.now_s)
        plan = make_plan(problem, solve)
        for name, count in plan.launches:
            for _ in range(count):
                make_ready(self.core, kinds[name], self.now_s)
                self.launched += 1
        for name, count in self.steady.releases(plan):
            for machine in self.core.grants.inventory.idle(name)[:count]:
                self.core.drain(machine.name, MachineEvent.RELEASE, "not needed", self.now_s)
                self.released += 1


@pytest.mark.parametrize("least_free", [4, 9])
def test_prices_that_take_turns_at_being_lower_replace_nothing_for_hours(least_free: int) -> None:
    loop = Loop()
    for number in range(WARM_UP):
        loop.round(number, least_free)
    assert loop.launched > 0
    before = loop.launched, loop.released
    for number in range(ROUNDS):
        loop.round(number, least_free)
    assert (loop.launched, loop.released) == before


def test_what_is_no_longer_needed_is_given_back() -> None:
    loop = Loop()
    for number in range(WARM_UP):
        loop.round(number, 20)
    before = loop.released
    for number in range(12):
        loop.round(number, 2)
    assert loop.released > before
    states = [one.state for one in loop.core.table]
    assert MachineState.RELEASING in states
