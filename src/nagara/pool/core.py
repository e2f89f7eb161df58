"""The pool as a pure machine: claims and events in, things to write and to do out.

It calls no provider and no machine, reads no clock and touches no disk. The shell (`service`, or
the simulation) makes `take_writes` durable first and then carries out `take_actions`; a crash
between any two such steps loses nothing, because every action can be told from the record:

    REQUESTED    a launch was perhaps sent: the provider's list says, or the deadline
    CHECKING     check it again
    RELEASING    ask for its release again; two lists without it confirm the end
    unknown name of ours in a list: nobody knows it, so it is released

All times are seconds of one clock that counts suspension and never jumps. Called from the pool's
loop only.
"""

import math
from collections.abc import Callable, Iterable

from nagara.contract.machine import (
    NO_RESOURCES,
    CheckKind,
    Offering,
    Presence,
    ProviderMachine,
    Resources,
)
from nagara.contract.replica import Lease
from nagara.pool import absence
from nagara.pool.actions import Action, Check, Granted, Launch, Lost, NoSlot, Release
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import IllegalEventError
from nagara.pool.fairness import Arbiter, Claimant
from nagara.pool.grants import Grants
from nagara.pool.leadtime import LeadTimes
from nagara.pool.machines import Machine, MachineRow, MachineTable, Saved, Writes, restored
from nagara.pool.refusals import earliest_s, why_none
from nagara.pool.states import IN_FLIGHT, MachineEvent, MachineState
from nagara.pool.supply import Supply

OWN = "local"  # the last part of the own machine's name
LEAST_BOOT_S, LATE_BOOT = 300.0, 4.0  # given up after so many times the typical lead

_S, _E = MachineState, MachineEvent


class PoolCore:
    """All machines of one pool.

    Args:
        saved: what an earlier process left; nothing for a new pool.
        new_name: gives names no machine ever had; they begin with the pool's prefix.
        own: what this process's own machine offers; it is there without being launched.
    """

    def __init__(
        self,
        saved: Saved,
        new_name: Callable[[], str],
        now_s: float,
        *,
        own: Offering | None = None,
    ) -> None:
        self.prefix = saved.pool
        self.table = MachineTable()
        self.supply = Supply()
        self.leads = LeadTimes()
        self.arbiter = Arbiter()
        self.own = f"{saved.pool}-{OWN}"
        self.grants = Grants(self.table)
        self.misses = 0
        self.claims = 0
        self._new_name = new_name
        self._ticked_s = now_s
        self._actions: list[Action] = []
        self._lost: list[Lost] = []
        rows = {row.name: row for row in saved.machines}
        self._add_own(rows.pop(self.own, None), own, now_s)
        for row in rows.values():
            self.table.add(restored(row, now_s), is_known=True)
        self.grants.load(saved.leases, now_s, self.arbiter)
        for machine in self.table:
            self._act(machine, now_s)
            self.grants.file(machine)

    def _add_own(self, row: MachineRow | None, own: Offering | None, now_s: float) -> None:
        """This machine, with what it offers now. What a person said of it stays."""
        if own is None:
            if row is not None:
                self.table.forget(self.own)
            return
        is_held = row is not None and row.state is _S.DRAINING and row.after_drain is None
        machine = Machine(
            name=self.own, offering=own, state=_S.DRAINING if is_held else _S.READY,
            epoch=1 if row is None else row.epoch, since_s=now_s,
            reason=row.reason if row is not None and is_held else "", is_own=True,
            kept_out=frozenset() if row is None else frozenset(row.kept_out),
        )  # fmt: skip
        self.table.add(machine, is_known=row is not None and row.offering == own)

    # -- what the shell takes --------------------------------------------------------------

    def take_writes(self) -> Writes:
        """To be made durable before the actions are carried out."""
        return self.table.take_writes()

    def take_actions(self) -> list[Action]:
        """To be carried out once the writes taken before are durable."""
        actions, self._actions = self._actions, []
        return actions

    def put_back(self, writes: Writes, actions: list[Action]) -> None:
        """What was taken could not be written, so nothing of it was done: it is still to do."""
        self.table.put_back(writes)
        self._actions = [*actions, *self._actions]

    def take_lost(self) -> list[Lost]:
        """Leases that ended because their machine is gone."""
        lost, self._lost = self._lost, []
        return lost

    # -- claims ----------------------------------------------------------------------------

    def claim(
        self,
        claimant: Claimant,
        wanted: DemandClass,
        now_s: float,
        needs: Resources = NO_RESOURCES,
    ) -> Granted | NoSlot:
        """A slot at once, or why there is none. A miss is remembered for fairness."""
        self.claims += 1
        ahead = self.arbiter.ahead_of(claimant, now_s)
        if ahead and self.grants.inventory.free_for(wanted) <= ahead:
            self.misses += 1
            self.arbiter.missed(claimant, 1, now_s)
            return NoSlot(
                "what is free is for apps that go first",
                earliest_s(self.table, self.leads, wanted, now_s),
            )
        machine = self.grants.inventory.find(wanted, needs)
        if machine is None:
            self.misses += 1
            self.arbiter.missed(claimant, 1, now_s)
            return NoSlot(
                why_none(self.table, wanted), earliest_s(self.table, self.leads, wanted, now_s)
            )
        self.arbiter.served(claimant.app)
        lease = self.grants.grant(machine, claimant.app, wanted, needs)
        return Granted(lease, machine.name, machine.address)

    def claim_spare(
        self, claimant: Claimant, wanted: DemandClass, needs: Resources, on: str | None = None
    ) -> Granted | NoSlot:
        """A slot for work that can wait for ever: neither a miss nor a turn taken.

        `on` names the only machine that will do.
        """
        inventory = self.grants.inventory
        known = None if on is None else self.table.get(on)
        machine = inventory.find(wanted, needs) if on is None else known
        if on is not None and (known is None or not inventory.has_slot(known, wanted, needs)):
            machine = None
        if machine is None:
            return NoSlot(why_none(self.table, wanted), None)
        self.arbiter.served(claimant.app)
        lease = self.grants.grant(machine, claimant.app, wanted, needs)
        return Granted(lease, machine.name, machine.address)

    def give_back(self, lease: Lease, now_s: float, *, is_confirmed: bool) -> bool:
        """Ends a lease; False if it is not the present one.

        `is_confirmed`: its machine says that nothing of the replica runs any more. Otherwise the
        slot is granted again only when the lease's time is over.
        """
        held = self.grants.held(lease)
        if held is None:
            return False
        machine = self.grants.give_back(held, now_s, is_confirmed=is_confirmed)
        if is_confirmed:
            self.arbiter.gave_back(held.app)
            self._emptied(machine, now_s)
        return True

    def adopt(self, lease: Lease, app: str) -> bool:
        """A replica of an earlier process lives on under this lease; False if it may not."""
        return self.grants.adopt(lease, app)

    # -- orders ----------------------------------------------------------------------------

    def request(self, offering: Offering, now_s: float) -> str:
        """Orders one machine; returns its name."""
        name = self._new_name()
        assert name.startswith(self.prefix), (name, self.prefix)
        machine = Machine(
            name=name, offering=offering, state=_S.REQUESTED, epoch=1, since_s=now_s,
            requested_s=now_s,
        )  # fmt: skip
        self.table.add(machine)
        self._actions.append(Launch(name, machine.epoch, offering))
        return name

    def drain(self, name: str, then: MachineEvent, reason: str, now_s: float) -> None:
        """No new leases; once empty, `then` happens (RELEASE, DIAGNOSE, CONDEMN, or RESUME)."""
        machine = self.table.named(name)
        if machine.state is _S.READY:
            machine.after_drain = then
            self._move(machine, _E.DRAIN, now_s, reason)
        elif machine.state is _S.DRAINING:
            machine.after_drain = then
            self.table.touch(machine)
            self._emptied(machine, now_s)
        else:
            # The table says whether the order can be followed at once.
            self._move(machine, then, now_s, reason)

    def hold(self, name: str, reason: str, now_s: float) -> None:
        """A person's drain: it stays in the pool, empty, until resumed or its time is over."""
        machine = self.table.named(name)
        self._move(machine, _E.DRAIN, now_s, reason)

    def resume(self, name: str, now_s: float) -> None:
        """Back into use."""
        self._move(self.table.named(name), _E.RESUME, now_s)

    def keep_out(self, name: str, why: str) -> None:
        """No new leases, without any other consequence, until every such reason is lifted."""
        machine = self.table.get(name)
        if machine is not None:
            self._set_kept_out(machine, machine.kept_out | {why})

    def let_in(self, name: str, why: str) -> None:
        """One reason to keep the machine from new leases is no more; others may be."""
        machine = self.table.get(name)
        if machine is not None:
            self._set_kept_out(machine, machine.kept_out - {why})

    def _set_kept_out(self, machine: Machine, reasons: frozenset[str]) -> None:
        if machine.kept_out != reasons:
            machine.kept_out = reasons
            self.table.touch(machine)
            self.grants.file(machine)

    def diagnose(self, name: str, kind: CheckKind, reason: str, now_s: float) -> None:
        """Takes the machine out of use and has it looked at, once it is empty."""
        machine = self.table.named(name)
        before, machine.diagnosis = machine.diagnosis, kind
        try:
            self.drain(name, _E.DIAGNOSE, reason, now_s)
        except IllegalEventError:
            machine.diagnosis = before
            raise

    # -- what providers and machines say ---------------------------------------------------

    def accepted(self, launch: Launch, now_s: float) -> None:
        """The provider took the order."""
        self.supply.granted(launch.offering.id, now_s)
        machine = self._still(launch, _S.REQUESTED)
        if machine is not None:
            self._move(machine, _E.ACCEPTED, now_s)

    def refused(self, launch: Launch, why: str, now_s: float) -> None:
        """The provider certainly made no machine."""
        self.supply.refused(launch.offering.id, why, now_s)
        machine = self._still(launch, _S.REQUESTED)
        if machine is not None:
            self._move(machine, _E.REFUSED, now_s, why)

    def unclear(self, launch: Launch, why: str, now_s: float) -> None:
        """The launch ended in an error that says nothing: the machine may exist."""
        self.supply.refused(launch.offering.id, why, now_s)

    def listed(
        self,
        provider: str,
        machines: Iterable[ProviderMachine],
        offerings: dict[str, Offering],
        begun_s: float,
        now_s: float,
    ) -> str | None:
        """The provider's whole list, asked for at `begun_s`. Both ways: lost ones, unknown ones.

        A list says nothing of a machine that changed after it was asked for. Returns why the
        list is doubted, if it is.
        """
        found = {one.name: one for one in machines if one.name.startswith(self.prefix)}
        addresses = {one.address for one in found.values() if one.address}
        known = [one for one in self.table if one.offering.provider == provider]
        doubt = absence.doubt(provider, known, found)
        for machine in known:
            seen = found.pop(machine.name, None)
            if seen is not None:
                self._present(machine, seen, now_s)
            elif self._may_be_absent(machine, begun_s) and absence.is_believed(
                machine, begun_s,
                is_doubted=doubt is not None, is_replaced=machine.address in addresses,
            ):  # fmt: skip
                self._absent(machine, now_s)
        for name, seen in found.items():
            self._stray(name, seen, provider, offerings, now_s)
        return doubt

    def _present(self, machine: Machine, seen: ProviderMachine, now_s: float) -> None:
        machine.absences = 0
        if machine.address != seen.address:
            machine.address = seen.address
            self.table.touch(machine)
        if machine.state is _S.REQUESTED:
            self._move(machine, _E.ACCEPTED, now_s)
        if machine.state is not _S.BOOTING:
            return
        if seen.presence is Presence.RUNNING:
            self._move(machine, _E.UP, now_s)
        elif seen.presence is Presence.REFUSED:
            self.supply.refused(machine.offering.id, seen.problem, now_s)
            self._move(machine, _E.REFUSED, now_s, seen.problem)

    def _may_be_absent(self, machine: Machine, begun_s: float) -> bool:
        if machine.state is _S.REQUESTED or begun_s < machine.since_s:
            return False
        asked_s = machine.release_asked_s
        return machine.state is not _S.RELEASING or (asked_s is not None and begun_s >= asked_s)

    def _absent(self, machine: Machine, now_s: float) -> None:
        if machine.state in (_S.READY, _S.DRAINING):
            self.supply.reclaimed(machine.offering.id, now_s)
        elif machine.state in IN_FLIGHT:
            self.supply.failed_boot(machine.offering.id, "vanished while booting", now_s)
        self._move(machine, _E.ABSENT, now_s, "its provider no longer lists it")

    def _stray(
        self,
        name: str,
        seen: ProviderMachine,
        provider: str,
        offerings: dict[str, Offering],
        now_s: float,
    ) -> None:
        unknown = Offering(seen.offering, provider, "unknown", "unknown", 1, 0.0)
        machine = Machine(
            name=name, offering=offerings.get(seen.offering, unknown), state=_S.RELEASING,
            epoch=1, since_s=now_s, reason="listed by its provider, unknown to the pool",
            requested_s=now_s,
        )  # fmt: skip
        self.table.add(machine)
        self._act(machine, now_s)

    def released(self, release: Release, now_s: float) -> None:
        """The provider was asked; from now on a list may confirm it."""
        machine = self._still(release, _S.RELEASING)
        if machine is not None:
            machine.release_asked_s = now_s

    def checked(self, check: Check, now_s: float, failure: str | None) -> None:
        """A check has ended. `failure` None: good enough for use."""
        wanted = _S.CHECKING if check.kind is CheckKind.BOOT else _S.DIAGNOSING
        machine = self._still(check, wanted)
        if machine is None:
            return
        offering = machine.offering.id
        if failure is None or machine.is_own:  # there is none to take our own machine's place
            if wanted is _S.CHECKING:
                self.supply.booted(offering, now_s)
                self.leads.add(offering, now_s - machine.requested_s)
            machine.kept_out = frozenset()
            self._move(machine, _E.PASSED, now_s, failure or "")
        else:
            if wanted is _S.CHECKING:
                self.supply.failed_boot(offering, failure, now_s)
            self._move(machine, _E.FAILED, now_s, failure)

    def check_again(self, check: Check) -> None:
        """The machine could not be asked: once more, until its deadline."""
        wanted = _S.CHECKING if check.kind is CheckKind.BOOT else _S.DIAGNOSING
        if self._still(check, wanted) is not None:
            self._actions.append(check)

    def marked(self, name: str, mark_s: float, now_s: float, version: str = "") -> None:
        """The machine told its clock, and the version of its agent."""
        self.heard(name, now_s)
        machine = self.table.get(name)
        if machine is not None and version:
            machine.version = version
        if machine is not None and machine.clock is not None:
            machine.clock.received(mark_s, now_s)
            if machine.is_silent:
                machine.is_silent = False
                self.grants.file(machine)

    def heard(self, name: str, now_s: float) -> None:
        """The machine has answered something."""
        machine = self.table.get(name)
        if machine is not None:
            machine.heard_s = now_s

    def silent(self, name: str) -> None:
        """The machine did not answer: no new leases until it does."""
        machine = self.table.get(name)
        if machine is not None and not machine.is_silent and not machine.is_own:
            machine.is_silent = True
            self.grants.file(machine)

    # -- time ------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Deadlines, and slots whose unconfirmed leases are over. At least once a second or so."""
        self.supply.ran_since(self.table, self._ticked_s, now_s)
        self._ticked_s = now_s
        for machine in self.table:
            deadline_s = machine.deadline_s()
            if machine.state is _S.BOOTING:
                expected_s = max(
                    LEAST_BOOT_S, LATE_BOOT * self.leads.typical_s(machine.offering.id)
                )
                deadline_s = min(deadline_s or math.inf, machine.since_s + expected_s)
            if deadline_s is not None and now_s >= deadline_s:
                self._overdue(machine, now_s)
            clock = machine.clock
            if clock is None or machine.is_own:
                continue
            if not machine.held:
                clock.rest()
            elif now_s >= clock.over_at_s:
                self._all_over(machine, now_s)
        for machine, app in self.grants.expire(now_s):
            self.arbiter.gave_back(app)
            self._emptied(machine, now_s)

    def slept(self, seconds: float) -> None:
        """Nobody could be asked for so long. Leases went on; deadlines wait for an answer."""
        for machine in self.table:
            machine.since_s += seconds

    def _all_over(self, machine: Machine, now_s: float) -> None:
        """It has been silent for so long that its keeper has ended all its replicas."""
        self.silent(machine.name)
        self._drop_leases(machine, f"{machine.name} has not answered for longer than its leases")
        self._emptied(machine, now_s)

    def _overdue(self, machine: Machine, now_s: float) -> None:
        if machine.state is _S.DRAINING and machine.after_drain is None:
            return  # a person's drain lasts as long as the person wants
        if machine.is_own:
            if machine.state is _S.DIAGNOSING:
                self._move(machine, _E.PASSED, now_s, "its checks took too long")
            return
        if machine.state in IN_FLIGHT:
            self.supply.failed_boot(machine.offering.id, f"too long {machine.state}", now_s)
        self._move(machine, _E.OVERDUE, now_s, f"too long {machine.state}")

    # -- inside ----------------------------------------------------------------------------

    def _still(self, action: Action, state: MachineState) -> Machine | None:
        """The machine, if it is in the state in which the action was ordered."""
        machine = self.table.get(action.name)
        is_same = machine is not None and machine.epoch == action.epoch
        return machine if is_same and machine is not None and machine.state is state else None

    def _move(self, machine: Machine, event: MachineEvent, now_s: float, reason: str = "") -> None:
        self.grants.inventory.unfile(machine)
        try:
            self.table.move(machine.name, machine.epoch, event, now_s, reason)
        finally:
            self.grants.file(machine)
        machine.absences = 0
        if machine.state is not _S.DRAINING:
            machine.after_drain = None
        if machine.state is _S.READY:
            machine.diagnosis = CheckKind.MEDIUM
        if machine.state in (_S.RELEASING, _S.QUARANTINED, _S.GONE):
            self._drop_leases(machine, reason or str(event))
        self._act(machine, now_s)

    def _drop_leases(self, machine: Machine, reason: str) -> None:
        for held in list(machine.held.values()):
            self._lost.append(Lost(Lease(held.slot, held.epoch), held.app, reason))
            self.arbiter.gave_back(held.app)
            self.grants.forget(machine, held)

    def _act(self, machine: Machine, now_s: float) -> None:
        """What the present state asks for; called on entering it and after a restart."""
        if machine.state is _S.RELEASING:
            machine.release_asked_s = None
            self._actions.append(Release(machine.name, machine.epoch, machine.offering.provider))
        elif machine.state is _S.CHECKING:
            self._actions.append(Check(machine.name, machine.epoch, CheckKind.BOOT))
        elif machine.state is _S.DIAGNOSING:
            self._actions.append(Check(machine.name, machine.epoch, machine.diagnosis))
        elif machine.state is _S.DRAINING:
            self._emptied(machine, now_s)

    def _emptied(self, machine: Machine, now_s: float) -> None:
        if (
            machine.state is _S.DRAINING
            and machine.after_drain is not None
            and not machine.held
            and self.table.get(machine.name) is machine
        ):
            self._move(machine, machine.after_drain, now_s, machine.reason)
