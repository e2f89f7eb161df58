"""Random lives of a pool: whatever fails in whatever order, slots and machines are accounted for.

The world is what really exists: machines, what runs on them, their own clocks, messages on their
way. The pool sees it only through lists and answers. Crashes fall between any two durable steps.
"""

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nagara.contract.machine import CheckKind, Presence, ProviderMachine, Renewal
from nagara.contract.replica import Lease
from nagara.pool.actions import Check, Granted, Launch, Release
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import ANY, DemandClass
from nagara.pool.errors import IllegalEventError
from nagara.pool.fairness import Claimant
from nagara.pool.greedy import greedy_plan
from nagara.pool.lease import SKEW_S, TTL_S, split_slot
from nagara.pool.ledger import MemoryLedger
from nagara.pool.meters import Meters
from nagara.pool.sizing import Policy, make_problem
from nagara.pool.states import MachineEvent, MachineState
from nagara.testing.pools import an_offering

from .pool_steps import step
from .pool_world import Message, RealMachine, pick

OFFERINGS = {"a": an_offering("a"), "b": an_offering("b", price_h=2.0, devices=1)}
APPS = ("x", "y", "z")


class PoolLife(RuleBasedStateMachine):
    """Rules are what can happen, invariants what must hold after each."""

    @initialize()
    def begin(self) -> None:
        self.now_s, self.names = 1000.0, 0
        self.world: dict[str, RealMachine] = {}
        self.launches: list[Launch] = []  # sent, not yet arrived
        self.messages: list[Message] = []
        self.old_lists: list[tuple[float, list[ProviderMachine]]] = []
        self.ledger = MemoryLedger()
        self.epochs: dict[tuple[str, int], int] = {}  # newest durable grant, by device
        self.core = self.new_core()
        self.checks: list[Check] = []
        self.leases: dict[Lease, str] = {}  # what the control process believes it holds

        self.grow("a")
        self.grow("b")

    @rule(kind=st.sampled_from(sorted(OFFERINGS)))
    def grow(self, kind: str) -> None:
        """A machine that comes up without any trouble."""
        if len(self.core.table) >= 6:
            return
        name = self.core.request(OFFERINGS[kind], self.now_s)
        self.carry_out()
        launch = next(one for one in self.launches if one.name == name)
        self.launches.remove(launch)
        self.world[name] = RealMachine(launch.offering, 7.0 * self.names, is_up=True)
        self.core.accepted(launch, self.now_s)
        self.now_s += 1.0
        self.core.listed("p", self.listing(), OFFERINGS, self.now_s, self.now_s)
        self.carry_out()
        check = next(one for one in self.checks if one.name == name)
        self.checks.remove(check)
        self.core.checked(check, self.now_s, None)
        self.carry_out()

    def new_core(self) -> PoolCore:
        return PoolCore(self.ledger.read(), self.new_name, self.now_s)

    def new_name(self) -> str:
        self.names += 1
        return f"n0-{self.names}"

    # -- the shell, with crashes -----------------------------------------------------------

    def carry_out(self, crash_after: int | None = None) -> None:
        """Writes, then acts; a crash after that many steps ends the process."""
        steps = 0

        def is_crash() -> bool:
            nonlocal steps
            steps += 1
            return crash_after is not None and steps > crash_after

        while True:
            writes, actions = self.core.take_writes(), self.core.take_actions()
            if is_crash():
                return self.restart()
            self.ledger.write(writes)
            for action in actions:
                if is_crash():
                    return self.restart()
                self.act(action)
            for lost in self.core.take_lost():
                self.leases.pop(lost.lease, None)
            if not (actions or writes):
                return None

    def act(self, action: Launch | Release | Check) -> None:
        if isinstance(action, Launch):
            self.launches.append(action)
        elif isinstance(action, Release):
            self.world.pop(action.name, None)
            self.core.released(action, self.now_s)
        else:
            self.checks.append(action)

    def restart(self) -> None:
        """A new process: everything not written is forgotten; machines are asked what runs."""
        self.checks, self.leases, self.old_lists = [], {}, []
        self.core = self.new_core()
        for name, machine in self.world.items():
            if machine.is_cut_off:
                continue
            for slot, (epoch, app) in list(machine.running.items()):
                lease = Lease(slot, epoch)
                if self.core.adopt(lease, app):
                    self.leases[lease] = app
                else:
                    self.end_on(name, lease)

    # -- rules: machines -------------------------------------------------------------------

    @rule(kind=st.sampled_from(sorted(OFFERINGS)), crash=st.none() | st.integers(0, 2))
    def order(self, kind: str, crash: int | None) -> None:
        if len(self.core.table) < 6:
            self.core.request(OFFERINGS[kind], self.now_s)
            self.carry_out(crash)

    @precondition(lambda self: self.launches)
    @rule(
        data=st.data(), outcome=st.sampled_from(["yes", "no", "reset", "reset after"]),
        offset_s=st.floats(-1e5, 1e5), crash=st.none() | st.integers(0, 2),
    )  # fmt: skip
    def launch_arrives(self, data: Any, outcome: str, offset_s: float, crash: int | None) -> None:
        launch = pick(data, self.launches)
        self.launches.remove(launch)
        if outcome in ("yes", "reset after"):
            self.world[launch.name] = RealMachine(launch.offering, offset_s)
        if outcome == "yes":
            self.core.accepted(launch, self.now_s)
        elif outcome == "no":
            self.core.refused(launch, "none left", self.now_s)
        else:
            self.core.unclear(launch, "connection reset", self.now_s)
        self.carry_out(crash)

    @precondition(lambda self: self.world)
    @rule(data=st.data(), what=st.sampled_from(["boot", "cut", "heal", "vanish"]))
    def machine_changes(self, data: Any, what: str) -> None:
        name = pick(data, sorted(self.world))
        machine = self.world[name]
        if what == "boot":
            machine.is_up = True
        elif what == "vanish":
            del self.world[name]
        else:
            machine.is_cut_off = what == "cut"

    @rule(is_stale=st.booleans(), crash=st.none() | st.integers(0, 3))
    def provider_lists(self, is_stale: bool, crash: int | None) -> None:
        begun_s, listing = self.now_s, self.listing()
        if is_stale and self.old_lists:
            begun_s, listing = self.old_lists[-1]
        self.old_lists = [*self.old_lists, (self.now_s, self.listing())][-3:]
        self.core.listed("p", listing, OFFERINGS, begun_s, self.now_s)
        self.carry_out(crash)

    def listing(self) -> list[ProviderMachine]:
        return [
            ProviderMachine(
                name, machine.offering.id, Presence.RUNNING if machine.is_up else Presence.PENDING
            )
            for name, machine in self.world.items()
        ]

    @precondition(lambda self: self.checks)
    @rule(data=st.data(), is_good=st.booleans(), crash=st.none() | st.integers(0, 2))
    def check_ends(self, data: Any, is_good: bool, crash: int | None) -> None:
        check = pick(data, self.checks)
        self.checks.remove(check)
        self.core.checked(check, self.now_s, None if is_good else "bad")
        self.carry_out(crash)

    @precondition(lambda self: len(self.core.table))
    @rule(
        data=st.data(), crash=st.none() | st.integers(0, 2),
        then=st.sampled_from([MachineEvent.RELEASE, MachineEvent.DIAGNOSE, MachineEvent.RESUME]),
    )  # fmt: skip
    def order_on_machine(self, data: Any, then: MachineEvent, crash: int | None) -> None:
        name = pick(data, sorted(one.name for one in self.core.table))
        try:
            if then is MachineEvent.RESUME:
                self.core.resume(name, self.now_s)
            else:
                self.core.drain(name, then, "an order", self.now_s)
        except IllegalEventError:
            return
        self.carry_out(crash)

    @precondition(lambda self: len(self.core.table))
    @rule(
        data=st.data(), crash=st.none() | st.integers(0, 1),
        what=st.sampled_from(["keep out", "let in", "hold", "diagnose"]), why=st.sampled_from("xy"),
    )  # fmt: skip
    def machine_is_suspect(self, data: Any, what: str, why: str, crash: int | None) -> None:
        name = pick(data, sorted(one.name for one in self.core.table))
        try:
            if what == "hold":
                self.core.hold(name, "by hand", self.now_s)
            elif what == "diagnose":
                self.core.diagnose(name, CheckKind.HEAVY, "by hand", self.now_s)
            elif what == "keep out":
                self.core.keep_out(name, why)
            else:
                self.core.let_in(name, why)
        except IllegalEventError:
            return
        self.carry_out(crash)

    # -- rules: leases ---------------------------------------------------------------------

    @rule(
        app=st.sampled_from(APPS), devices=st.integers(1, 2),
        crash=st.none() | st.integers(0, 1), is_delivered=st.booleans(),
    )  # fmt: skip
    def claim(self, app: str, devices: int, crash: int | None, is_delivered: bool) -> None:
        granted = self.core.claim(Claimant(app), DemandClass(devices=devices), self.now_s)
        if not isinstance(granted, Granted):
            return
        real = self.world.get(granted.machine)
        if real is not None:
            running = {one for slot in real.running for one in split_slot(slot)[1]}
            assert not running & set(split_slot(granted.lease.slot)[1]), "granted while it runs"
        before = self.core
        self.carry_out(crash)
        if self.core is not before:
            return  # crashed: nothing was started under it
        self.leases[granted.lease] = app
        machine, devices = split_slot(granted.lease.slot)
        for device in devices:
            assert granted.lease.epoch > self.epochs.get((machine, device), 0)
            self.epochs[machine, device] = granted.lease.epoch
        self.tell_mark(granted.machine)
        known = self.core.table.get(granted.machine)
        mark_s = (
            known.clock.to_send(self.now_s)
            if known is not None and known.clock is not None
            else None
        )
        if mark_s is None:
            return
        order = Renewal(granted.lease.slot, granted.lease.epoch, mark_s, TTL_S)
        self.messages.append(Message(granted.machine, order, app))
        if is_delivered:
            self.deliver(self.messages[-1])

    def tell_mark(self, name: str) -> None:
        machine = self.world.get(name)
        if machine is not None and not machine.is_cut_off:
            self.core.marked(name, self.now_s + machine.clock_offset_s, self.now_s)

    def deliver(self, message: Message) -> None:
        self.messages.remove(message)
        machine = self.world.get(message.machine)
        if machine is None or machine.is_cut_off:
            return
        ended = machine.fence.begin(message.order, self.now_s + machine.clock_offset_s)
        if ended is not None:
            for slot in ended:
                machine.running.pop(slot, None)
            machine.running[message.order.slot] = (message.order.epoch, message.app)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def message_arrives(self, data: Any) -> None:
        self.deliver(pick(data, self.messages))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), crash=st.none() | st.integers(0, 1))
    def give_back(self, data: Any, crash: int | None) -> None:
        lease = pick(data, sorted(self.leases, key=str))
        del self.leases[lease]
        is_confirmed = self.end_on(split_slot(lease.slot)[0], lease)
        self.core.give_back(lease, self.now_s, is_confirmed=is_confirmed)
        self.carry_out(crash)

    def end_on(self, name: str, lease: Lease) -> bool:
        machine = self.world.get(name)
        if machine is None or machine.is_cut_off:
            return False
        for slot in machine.fence.raise_to(lease.slot, lease.epoch + 1):
            machine.running.pop(slot, None)
        return True

    @precondition(lambda self: self.leases)
    @rule(is_answered=st.booleans())
    def renew(self, is_answered: bool) -> None:
        for lease in sorted(self.leases, key=str):
            name = split_slot(lease.slot)[0]
            machine, known = self.world.get(name), self.core.table.get(name)
            if machine is None or machine.is_cut_off or known is None or known.clock is None:
                continue
            mark_s = known.clock.to_send(self.now_s)
            if mark_s is not None:
                theirs_s = self.now_s + machine.clock_offset_s
                machine.fence.renew((Renewal(lease.slot, lease.epoch, mark_s, TTL_S),), theirs_s)
                if is_answered:
                    self.core.marked(name, theirs_s, self.now_s)

    # -- rules: time -----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 20.0, 130.0, 1300.0]),
          crash=st.none() | st.integers(0, 2))  # fmt: skip
    def time_passes(self, seconds: float, crash: int | None) -> None:
        self.now_s += seconds
        for machine in self.world.values():
            for slot in machine.fence.expire(self.now_s + machine.clock_offset_s):
                machine.running.pop(slot, None)
        self.core.tick(self.now_s)
        self.carry_out(crash)

    @rule()
    def crash(self) -> None:
        self.restart()

    @rule()
    def the_whole_host_reboots(self) -> None:
        """The clock of the pool begins anew; machines and their leases do not."""
        offset_s = self.now_s - 5.0
        self.now_s = 5.0
        for machine in self.world.values():
            machine.clock_offset_s += offset_s
        self.restart()

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def no_device_runs_two_replicas(self) -> None:
        for machine in getattr(self, "world", {}).values():
            devices = [one for slot in machine.running for one in split_slot(slot)[1]]
            assert len(devices) == len(set(devices)), machine.running

    @invariant()
    def every_device_is_free_or_held_once(self) -> None:
        for machine in self.core.table if hasattr(self, "core") else ():
            if machine.epochs:
                held = [one for slot in machine.held for one in split_slot(slot)[1]]
                every = sorted([*machine.free, *held])
                assert every == list(range(machine.offering.devices)), machine

    @invariant()
    def free_slots_are_counted_right(self) -> None:
        if hasattr(self, "core"):
            grantable = [
                machine
                for machine in self.core.table
                if machine.state is MachineState.READY
                and not (machine.is_kept_out or machine.is_silent)
            ]
            free = sum(len(machine.free) for machine in grantable)
            assert self.core.grants.inventory.free_slots == free
            held = sum(
                one.wanted.devices for machine in self.core.table for one in machine.held.values()
            )
            assert sum(self.core.grants.held_devices.values()) == held

    @invariant()
    def what_is_written_is_what_is_known(self) -> None:
        if hasattr(self, "core"):
            rows = {
                row.name: (row.state, row.epoch, row.after_drain, row.diagnosis, set(row.kept_out))
                for row in self.ledger.read().machines
            }
            known = {
                one.name: (one.state, one.epoch, one.after_drain, one.diagnosis, set(one.kept_out))
                for one in self.core.table
            }
            assert rows == known

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.settle()
        self.reserve_is_restored()
        for machine in list(self.core.table):
            self.core.drain(machine.name, MachineEvent.RELEASE, "the end", self.now_s)
        for lease in list(self.leases):
            self.core.give_back(lease, self.now_s, is_confirmed=True)
        self.settle()
        assert self.world == {}
        assert len(self.core.table) == 0

    def settle(self) -> None:
        """Nothing new happens; what is under way comes to its end."""
        for machine in self.world.values():
            machine.is_cut_off, machine.is_up = False, True
        for _ in range(14):
            self.settle_once(TTL_S + SKEW_S + 1)
        self.time_passes(5500.0, None)  # the longest deadline
        for _ in range(6):
            self.core.listed("p", self.listing(), OFFERINGS, self.now_s, self.now_s)
            self.carry_out()
            self.time_passes(20.0, None)
        known = {machine.name for machine in self.core.table}
        assert known == set(self.world), (known, set(self.world))

    def reserve_is_restored(self) -> None:
        meters, policy = Meters(), Policy(least_free=3, spare_machines=0)
        for _ in range(40):
            meters.claimed(ANY, self.now_s)
            problem = make_problem(self.core, OFFERINGS.values(), meters, policy, self.now_s)
            for name, count in greedy_plan(problem, "").launches:
                for _ in range(count):
                    self.core.request(OFFERINGS[name], self.now_s)
            self.carry_out()
            self.settle_once(120.0)
            if self.core.grants.inventory.free_slots >= 3:
                return
        raise AssertionError([(one.name, one.state) for one in self.core.table])

    def settle_once(self, seconds: float) -> None:
        for launch in list(self.launches):
            self.launches.remove(launch)
            self.world[launch.name] = RealMachine(launch.offering, 0.0, is_up=True)
            self.core.accepted(launch, self.now_s)
        self.core.listed("p", self.listing(), OFFERINGS, self.now_s, self.now_s)
        self.carry_out()
        for check in list(self.checks):
            self.checks.remove(check)
            self.core.checked(check, self.now_s, None)
        self.carry_out()
        for machine in list(self.core.table):
            if machine.is_silent:  # each is asked whether it still is
                self.tell_mark(machine.name)
        self.renew(is_answered=True)
        self.time_passes(seconds, None)


LIVES, STEPS = 40, 150


@pytest.mark.parametrize("seed", range(4))
def test_long_random_lives(seed: int) -> None:
    """Many more steps than hypothesis takes; the seed and the life's number repeat a failure."""
    for number in range(LIVES):
        source = random.Random(f"{seed}-{number}")
        life = PoolLife()
        life.begin()
        for _ in range(STEPS):
            step(life, source)
            life.no_device_runs_two_replicas()
            life.every_device_is_free_or_held_once()
            life.free_slots_are_counted_right()
            life.what_is_written_is_what_is_known()
        life.teardown()


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
