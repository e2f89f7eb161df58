"""The loop: plan a step, launch it, read and commit an earlier one.

    depth 0    plan 0  launch 0  commit 0  plan 1  launch 1  commit 1 ...
    depth 1    plan 0  launch 0  plan 1  launch 1  commit 0  plan 2  launch 2  commit 1 ...

With depth 1 the device computes step N + 1 while the host commits step N and plans step N + 2.
Everything here runs on the step thread.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from nagara.engine.errors import RequestError
from nagara.engine.graphs import StepGraphs
from nagara.engine.request import FinishReason, TokenLogprob
from nagara.engine.runner import Launched, Runner
from nagara.engine.scheduler import Outcome, Scheduler


@dataclass(slots=True)
class LoopTimes:
    """Where the step thread's time went, in seconds."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    host_s: float = 0.0  # planning, building, launching, committing
    wait_s: float = 0.0  # waiting for the device


class Committed(NamedTuple):
    """A token that has become known, with what it means."""

    outcome: Outcome
    logprob: TokenLogprob | None
    error: RequestError | None = None  # the request's own code failed: it has ended


class Core:
    """Scheduler and runner with at most `depth` steps in flight beyond the one being read."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, depth: int, *, is_checking: bool = False
    ) -> None:
        assert depth in (0, 1), "more would need more buffer sets and more carried tokens"
        self.scheduler = scheduler
        self.depth = depth
        self.times = LoopTimes()
        self._runner = runner
        self._in_flight: deque[Launched] = deque()
        self._is_checking = is_checking

    @property
    def graphs(self) -> StepGraphs | None:
        """The graphs captured so far, where the device has such."""
        return self._runner.graphs

    def capture(self, rows: int) -> None:
        """Capture the graphs of steps with so many rows ahead of need; not while a step runs."""
        assert not self._in_flight
        self._runner.capture(rows)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or not self.scheduler.is_idle

    def step(self) -> list[Committed]:
        """Go one step on; what has become known by it."""
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self._runner.launch(plan))
            self.times.rows += plan.rows
        committed: list[Committed] = []
        waited = 0.0
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            step = self._in_flight.popleft()
            before = time.perf_counter()
            step.out.wait()
            waited = time.perf_counter() - before
            committed = self._commit(step)
        if self._is_checking and not self.has_work:
            self.scheduler.audit()
        self.times.wait_s += waited
        self.times.host_s += time.perf_counter() - started - waited
        return committed

    def _commit(self, step: Launched) -> list[Committed]:
        results = self._runner.read(step)
        outcomes = self.scheduler.commit(step.plan, results.tokens)
        self.times.steps += 1
        self.times.tokens += len(outcomes)
        for outcome in outcomes:
            guide = outcome.sequence.guide
            if outcome.sample in results.faults:
                self.scheduler.end(outcome.sequence, FinishReason.CANCELLED)
            elif guide is not None and outcome.finish_reason is None:
                guide.accept(outcome.token_id)
        return [
            Committed(o, results.logprobs[o.sample], results.faults.get(o.sample)) for o in outcomes
        ]

    def drain(self) -> list[Committed]:
        """Commit what is in flight without planning more."""
        committed = []
        while self._in_flight:
            committed += self._commit(self._in_flight.popleft())
        return committed
