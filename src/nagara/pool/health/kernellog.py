"""The kernel's log: what it says of devices and memory, without following what was there before.

Read through /dev/kmsg without blocking; needs root where the log is restricted.
"""

import os
from dataclasses import dataclass, field

from nagara.contract.machine import CheckKind
from nagara.pool.health.round import CannotRunError, HealthCheck, UnhealthyError
from nagara.pool.health.xid import Action, XidPolicy, find_xids

_FATAL = (
    "Hardware Error", "Machine check events logged", "EXT4-fs error", "I/O error, dev",
    "Out of memory: Killed process 1 ",
)  # fmt: skip
_HARMLESS = frozenset({Action.IGNORE, Action.WARN})
_RECORD_BYTES = 8192


@dataclass(slots=True)
class KernelLog:
    """The log from its beginning, or from where it was last left."""

    path: str = "/dev/kmsg"
    _seen: int = field(default=-1)  # the last message's number

    def new_records(self) -> list[tuple[int, str]]:
        """Messages since the last call, with their numbers; the first call gives all there are."""
        fresh = []
        for record in self._records():
            head, _, text = record.partition(";")
            fields = head.split(",")
            number = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else self._seen + 1
            if number > self._seen:
                self._seen = number
                fresh.append((number, text or record))
        return fresh

    def lines(self) -> list[str]:
        """Every message now in the log."""
        return [record.partition(";")[2] or record for record in self._records()]

    def _records(self) -> list[str]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise CannotRunError(f"{self.path}: {error.strerror}") from error
        lines = []
        try:
            while True:
                try:
                    record = os.read(descriptor, _RECORD_BYTES)
                except BlockingIOError:
                    break  # the end of the log
                except BrokenPipeError:
                    continue  # overwritten while we read: the next one is there
                if not record:
                    break
                lines += record.decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)
        return lines


def check(log: KernelLog, policy: XidPolicy, kind: CheckKind = CheckKind.BOOT) -> HealthCheck:
    """The log must have no message after which the machine is not to be trusted.

    A new machine must have none that asks for diagnostics. In a round of diagnostics such messages
    are the reason for the round: the other checks judge what has become of it.
    """
    harmless = _HARMLESS if kind is CheckKind.BOOT else _HARMLESS | {Action.KEEP_OUT, Action.DRAIN}
    return HealthCheck("kernel log", lambda: _check(log, policy, harmless), 10.0)


def _check(log: KernelLog, policy: XidPolicy, harmless: frozenset[Action]) -> str:
    lines = log.lines()
    for line in lines:
        if any(word in line for word in _FATAL):
            raise UnhealthyError(line.strip()[:200])
    worst = policy.worst(find_xids(lines))
    if worst is not None and worst[1].action not in harmless:
        event, judgement = worst
        raise UnhealthyError(f"Xid {event.code} on {event.device}: {judgement.cause}")
    return f"{len(lines)} messages, nothing fatal"
