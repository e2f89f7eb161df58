"""Judges a chaos run: the clients' log against the ledger that the app kept and the faults. Pure.

A request may fail, but honestly: with an answer that says so and why, or with a connection that
visibly broke, and only if a fault was at work. What was answered well must be right and done;
what must not be done twice must not be; what was refused must not have been done.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

HONEST = {
    429: {"queue_full"},
    502: {"replica_failed"},
    503: {"start_failed", "no_supply", "unreachable", "queue_timeout", "stopping"},
    504: {"request_timeout"},
}
# Refused before any replica was asked: nothing may have been done.
UNTOUCHED = {"start_failed", "no_supply", "unreachable", "queue_timeout", "stopping", "queue_full"}
# How long after its end a fault may be felt: what was broken is made anew on a busy machine.
FELT_S = {"replica": 15.0, "agent": 30.0, "daemon": 30.0, "control": 15.0, "disk": 30.0}

STALL_S = 20.0  # nothing that these clients ask for takes so long where nothing is broken


@dataclass(frozen=True, slots=True)
class Call:
    """One request as its client saw it. Times in seconds of one clock."""

    id: str
    kind: str  # read, work, stream or ws
    begun_s: float
    ended_s: float
    status: int | None  # None: the connection broke, or never was
    code: str = ""  # of a refusal
    is_right: bool = True  # what was received is the answer or an honest beginning of it
    is_whole: bool = True
    replica: str = ""  # the one that was asked, if its name came

    @property
    def is_failed(self) -> bool:
        """Whether the client did not get what it asked for."""
        return self.status not in (200, 101) or not self.is_whole

    @property
    def symptom(self) -> str:
        """What its client saw."""
        if self.status is None:
            return "connection broke"
        if self.status in (200, 101):
            return "ok" if self.is_whole else "cut off"
        return f"{self.status} {self.code}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was broken on purpose, until `ended_s`."""

    kind: str
    begun_s: float
    ended_s: float
    replica: str = ""  # the one that was killed

    def explains(self, call: Call) -> bool:
        """Whether the call may have failed because of it."""
        until_s = self.ended_s + FELT_S[self.kind]
        if call.begun_s > until_s or call.ended_s < self.begun_s:
            return False
        if self.kind in ("control", "disk"):
            return True
        if self.kind == "replica" and call.replica:
            return call.replica == self.replica
        # The agent and the daemon stand behind no client's connection.
        return self.kind == "replica" or call.status is not None


@dataclass(slots=True)
class Verdict:
    """What was found. Good is a run without `wrong`."""

    calls: int = 0
    slowest_s: float = 0.0  # of answers that no fault has held up
    failed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def judge(
    calls: Sequence[Call],
    begun: Mapping[str, int],
    ended: Mapping[str, int],
    faults: Sequence[Fault],
    settled_s: float = float("inf"),
) -> Verdict:
    """Looks at every request.

    Args:
        begun, ended: how often the app began and ended each request, by its id.
        settled_s: from then on everything was repaired: nothing may fail any more.
    """
    verdict = Verdict(calls=len(calls))
    gaps = [fault for fault in faults if fault.kind == "disk"]  # it has no room for the ledger
    for call in calls:
        what = f"{call.kind} {call.id}"
        verdict.failed += call.is_failed
        verdict.answers[call.symptom] += 1
        times, whole = begun.get(call.id, 0), ended.get(call.id, 0)
        if call.kind == "ws":  # it ends after its client has all it wants
            whole = times
        if not call.is_right:
            verdict.wrong.append(f"{what}: a wrong answer")
        if call.kind == "work" and times > 1:
            verdict.wrong.append(f"{what}: done {times} times")
        if call.is_failed:
            felt = faults if call.begun_s < settled_s else ()
            verdict.wrong += [f"{what}: {fault}" for fault in _dishonest(call, times, felt)]
        elif not whole and not any(gap.explains(call) for gap in gaps):
            verdict.wrong.append(f"{what}: answered, but never done")
        if not call.is_failed and not any(fault.explains(call) for fault in faults):
            verdict.slowest_s = max(verdict.slowest_s, took_s := call.ended_s - call.begun_s)
            if took_s > STALL_S:
                verdict.wrong.append(f"{what}: took {took_s:.1f} s, and no fault explains it")
    return verdict


def _dishonest(call: Call, times: int, faults: Sequence[Fault]) -> Iterator[str]:
    if call.status is not None and call.status not in (200, 101):
        if call.code not in HONEST.get(call.status, set()):
            yield f"answered {call.status} {call.code!r}"
        if call.code in UNTOUCHED and times:
            yield f"refused with {call.code!r}, but done"
    if not any(fault.explains(call) for fault in faults):
        yield f"{call.symptom} ({call.replica or 'no replica'}), and no fault explains it"
