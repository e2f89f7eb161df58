"""Keeps machines healthy: what follows from suspicion, from Xid events and from the calendar.

Changes machines only through the core. Called from the pool's loop.
"""

import logging

from nagara.contract.machine import CheckKind, DeviceEvent, HealthReport, Outcome, Vitals
from nagara.pool.core import PoolCore
from nagara.pool.health.brake import Brake
from nagara.pool.health.kinds import Kinds, unexpected
from nagara.pool.health.schedule import Candidate, at_once, due
from nagara.pool.health.verdict import failure
from nagara.pool.health.watchdog import Watchdog
from nagara.pool.health.xid import Action, XidPolicy
from nagara.pool.machines import Machine
from nagara.pool.states import MachineEvent, MachineState

SILENT = "its monitor does not say how it is"

_log = logging.getLogger(__name__)


class Care:
    """One pool's health affairs."""

    def __init__(self, policy: XidPolicy | None = None) -> None:
        self.brake = Brake()
        self.watchdog = Watchdog()
        self.alerts: list[str] = []
        self._policy = policy or XidPolicy()
        self._watched: set[str] = set()
        self._stuck: set[str] = set()
        self._kinds = Kinds()
        self._heard: dict[str, str] = {}  # mark of the last vitals, by machine
        self._reports: dict[str, HealthReport] = {}
        self._checked_s: dict[str, float] = {}  # last heavy round passed, by machine

    def suspect(self, core: PoolCore, name: str, reason: str, now_s: float) -> bool:
        """Takes a ready machine out of use and has it diagnosed, unless the brake is on."""
        machine = core.table.get(name)
        if machine is None or machine.state is not MachineState.READY:
            return False
        if not self._may_remove(core, machine, reason, now_s):
            return False
        core.diagnose(name, CheckKind.MEDIUM, reason, now_s)
        return True

    def device_event(self, core: PoolCore, name: str, event: DeviceEvent, now_s: float) -> Action:
        """An Xid of a machine's device: what the table says is done."""
        judgement = self._policy.judge(event.code)
        reason = f"Xid {event.code} on {event.device}: {judgement.cause}"
        machine = core.table.get(name)
        if machine is None or judgement.action is Action.IGNORE:
            return judgement.action
        _log.warning("%s: %s", name, reason)
        is_doubtful = judgement.action is Action.KEEP_OUT and not machine.is_own
        if judgement.action is not Action.WARN and not (
            # Weak evidence: a driver's new code on every machine must not close the pool.
            is_doubtful and not self._may_remove(core, machine, reason, now_s)
        ):
            core.keep_out(name, reason)
        if judgement.action is Action.DRAIN:
            self.suspect(core, name, reason, now_s)
        elif judgement.action is Action.REMOVE and machine.state is MachineState.READY:
            self._condemn(core, machine, reason, now_s)
        return judgement.action

    def _condemn(self, core: PoolCore, machine: Machine, reason: str, now_s: float) -> None:
        if self._may_remove(core, machine, reason, now_s):
            core.drain(machine.name, MachineEvent.CONDEMN, reason, now_s)

    def seen(self, core: PoolCore, name: str, vitals: Vitals, now_s: float) -> None:
        """What the monitor of a machine says."""
        core.heard(name, now_s)
        self.watchdog.progress(_monitor(name), vitals.rounds, now_s)
        for event in vitals.events:
            self.device_event(core, name, event, now_s)
        for result in vitals.results:
            if result.outcome is Outcome.FAIL:
                self.suspect(core, name, f"{result.name}: {result.detail}", now_s)
        if name in core.table:
            self._heard[name] = vitals.mark

    def heard(self, name: str) -> str:
        """Up to where a machine's monitor was heard, for the next question."""
        return self._heard.get(name, "")

    def watch(self, core: PoolCore, every_s: float, now_s: float) -> None:
        """Expects every ready machine's monitor to make progress.

        A machine whose monitor is stuck is unknown: no new leases until it speaks again.
        """
        ready = {one.name for one in core.table if one.state is MachineState.READY}
        for name in self._watched - ready:
            self.watchdog.forget(_monitor(name))
        for name in [name for name in self._heard if name not in core.table]:
            del self._heard[name]
        for name in [name for name in self._reports if name not in core.table]:
            del self._reports[name]
            self._checked_s.pop(name, None)
        self._kinds.keep({one.name for one in core.table})
        for name in ready - self._watched:
            self.watchdog.expect(_monitor(name), every_s, now_s)
        self._watched = ready
        stuck = set(self.watchdog.stuck(now_s))
        for name in ready:
            if _monitor(name) in stuck:
                core.keep_out(name, SILENT)
            elif self.watchdog.has_spoken(_monitor(name)):
                core.let_in(name, SILENT)

    def look_for_stuck(self, now_s: float) -> None:
        """Alerts of monitors and of the pool's own loops that have come to make no progress."""
        stuck = set(self.watchdog.stuck(now_s))
        for name in sorted(stuck - self._stuck):
            self.alert(f"{name} makes no progress: what it watches is unknown")
        self._stuck = stuck

    def judge(self, machine: Machine, report: HealthReport, required: frozenset[str]) -> str | None:
        """Why the machine must not be used after this round, or None."""
        type_ = machine.offering.type
        why = (
            failure(report, required)
            or unexpected(report, machine.offering)
            or self._kinds.below(machine.name, type_, report)
        )
        if why is None:
            self._kinds.note(machine.name, type_, report)
        return why

    def checked(self, name: str, report: HealthReport, why: str | None, now_s: float) -> None:
        """A round of checks of a machine has ended; `why` None: passed."""
        self._reports[name] = report
        if why is None and report.kind is CheckKind.HEAVY:
            self._checked_s[name] = now_s
        if why is None and report.kind is not CheckKind.BOOT:
            self.brake.healthy(name)
        if why is not None:
            _log.warning("%s failed its %s checks: %s", name, report.kind, why)

    def last_report(self, name: str) -> HealthReport | None:
        """The latest round of checks of a machine."""
        return self._reports.get(name)

    def to_document(self, now_s: float) -> dict[str, float]:
        """Ages of the last thorough rounds, by machine, as JSON."""
        return {name: now_s - at_s for name, at_s in self._checked_s.items()}

    def load(self, ages_s: dict[str, float], now_s: float, elapsed_s: float) -> None:
        """Takes over what an earlier process had looked at."""
        self._checked_s = {name: now_s - elapsed_s - age_s for name, age_s in ages_s.items()}

    def look_at_schedule(self, core: PoolCore, target: float, now_s: float) -> None:
        """Has idle machines diagnosed: those that are kept out, and those not seen to for long."""
        idle, under_way = [], self._diagnose_kept_out(core, now_s)
        for machine in core.table:
            is_idle = machine.state is MachineState.READY and not machine.held
            if is_idle and not machine.is_kept_out and not machine.is_own:
                # A machine that is new was looked at when it came.
                checked_s = self._checked_s.setdefault(machine.name, now_s)
                idle.append(Candidate(machine.name, len(machine.free), checked_s))
        level = core.grants.inventory.free_slots
        for name in due(idle, len(core.table), under_way, level, target, now_s):
            core.diagnose(name, CheckKind.HEAVY, "weekly diagnostics", now_s)

    def _diagnose_kept_out(self, core: PoolCore, now_s: float) -> int:
        """The way back into use of machines that get no new leases; how many are under way.

        Few at once: that so many are kept out may be the fault of the check, or of a network.
        """
        under_way = sum(one.state is MachineState.DIAGNOSING for one in core.table)
        for machine in core.table:
            if (
                machine.is_kept_out
                and machine.state is MachineState.READY
                and not machine.held
                and under_way < at_once(len(core.table))
            ):
                core.diagnose(machine.name, CheckKind.MEDIUM, min(machine.kept_out), now_s)
                under_way += 1
        return under_way

    def _may_remove(self, core: PoolCore, machine: Machine, reason: str, now_s: float) -> bool:
        if machine.is_own:
            self.alert(f"{machine.name}: {reason}; there is no machine to take its place")
            return False
        group = machine.offering.type
        size = sum(one.offering.type == group for one in core.table)
        if self.brake.may_remove(group, machine.name, size, now_s):
            return True
        alert = (
            f"many machines of type {group} seem unhealthy at once ({reason}): "
            "the check is suspect, none is taken out"
        )
        self.alert(alert)
        return False

    def alert(self, alert: str) -> None:
        """Something a person should look at."""
        if alert not in self.alerts[-1:]:
            _log.error("%s", alert)
            self.alerts = [*self.alerts, alert][-100:]


def _monitor(machine: str) -> str:
    return f"monitor of {machine}"
