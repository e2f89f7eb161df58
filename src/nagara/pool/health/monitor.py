"""A machine's own monitor: small rounds for as long as the machine runs.

Runs on the machine, in the agent; blocks for milliseconds. What it finds is kept until it is
asked. A round that fails to read something reports that, and counts as finished; one that hangs
does not, and is found out by the pool's watchdog.
"""

from collections.abc import Callable

from nagara.contract.machine import CheckResult, DeviceEvent, Outcome, Vitals
from nagara.pool.health.kernellog import KernelLog
from nagara.pool.health.round import CannotRunError, HealthCheck, outcome_of
from nagara.pool.health.xid import find_xids

_KEPT_EVENTS = 1000


class Monitor:
    """Events of the kernel log, and the latest result of each quick check.

    Args:
        checks: quick ones: temperature, memory errors, room in memory and on disk.
    """

    def __init__(self, log: KernelLog, checks: Callable[[], tuple[HealthCheck, ...]]) -> None:
        self._log = log
        self._checks = checks
        self._rounds = 0
        self._events: list[DeviceEvent] = []
        self._results: tuple[CheckResult, ...] = ()
        self._is_first = True

    def round(self) -> None:
        """One round."""
        results = [_quick(check) for check in self._checks()]
        try:
            lines = self._log.new_lines()
        except CannotRunError as error:
            results.append(CheckResult("kernel log", Outcome.DID_NOT_RUN, str(error)))
        else:
            # What was there before is for the boot checks to judge.
            if not self._is_first:
                self._events = [*self._events, *find_xids(lines)][-_KEPT_EVENTS:]
            self._is_first = False
        self._results = tuple(results)
        self._rounds += 1

    def take(self) -> Vitals:
        """What was found since the last call."""
        events, self._events = tuple(self._events), []
        return Vitals(self._rounds, events, self._results)


def _quick(check: HealthCheck) -> CheckResult:
    return CheckResult(check.name, *outcome_of(check))
