"""A machine's own monitor: small rounds for as long as the machine runs.

Runs on the machine, in the agent; blocks for milliseconds. What it finds is kept until the pool
says that it was heard: an answer may be lost on its way. What was heard is told by the number of a
message in the kernel's log, so that it means the same to a monitor that was started anew. A round
that fails to read something reports that, and counts as finished; one that hangs does not, and is
found out by the pool's watchdog.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from nagara.contract.machine import CheckResult, DeviceEvent, Outcome, Vitals
from nagara.pool.health.kernellog import KernelLog
from nagara.pool.health.round import CannotRunError, HealthCheck, result_of
from nagara.pool.health.xid import find_xids

_KEPT_EVENTS = 1000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Monitor:
    """Events of the kernel log, and the latest result of each quick check.

    Args:
        checks: quick ones: temperature, memory errors, room in memory and on disk.
        boot: tells this boot of the machine from others: message numbers begin anew with each.
    """

    def __init__(
        self,
        log: KernelLog,
        checks: Callable[[], tuple[HealthCheck, ...]],
        boot: str | None = None,
    ) -> None:
        self._log = log
        self._checks = checks
        self._boot = _BOOT_ID.read_text().strip() if boot is None else boot
        self._rounds = 0
        self._lock = threading.Lock()  # rounds and questions come from two threads
        self._events: list[tuple[int, DeviceEvent]] = []  # by the number of their message
        self._begun: int | None = None  # the last message before this monitor
        self._last = -1
        self._results: tuple[CheckResult, ...] = ()

    def round(self) -> None:
        """One round."""
        results = [result_of(check) for check in self._checks()]
        try:
            records = self._log.new_records()
        except CannotRunError as error:
            records = None
            results.append(CheckResult("kernel log", Outcome.DID_NOT_RUN, str(error)))
        with self._lock:
            if records is not None:
                self._note(records)
            self._results = tuple(results)
            self._rounds += 1

    def _note(self, records: list[tuple[int, str]]) -> None:
        found = [(number, event) for number, text in records for event in find_xids([text])]
        self._events = [*self._events, *found][-_KEPT_EVENTS:]
        self._last = max([self._last, *(number for number, _ in records)])
        if self._begun is None:
            self._begun = self._last

    def take(self, heard: str = "") -> Vitals:
        """What was found since.

        Args:
            heard: `Vitals.mark` of the last answer that arrived. Without one, or with one of
                another boot, only what this monitor saw happen: what was there before is for the
                boot checks to judge.
        """
        boot, _, number = heard.rpartition(":")
        with self._lock:
            if boot == self._boot and number.isdigit():
                after = int(number)
                self._events = [one for one in self._events if one[0] > after]
            else:
                after = self._last if self._begun is None else self._begun
            events = tuple(event for number_, event in self._events if number_ > after)
            mark = f"{self._boot}:{self._last}" if self._last >= 0 else ""
            return Vitals(self._rounds, events, self._results, mark)
