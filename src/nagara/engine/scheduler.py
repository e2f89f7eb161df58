"""Decides which rows each step computes and what its results mean.

Pure: no tensors, no clock, no threads. `plan` moves `planned`, `commit` moves `committed`; between
the two at most `depth` steps are in flight. Whatever a step in flight reads or writes is released
by the commit of that step, never earlier.

Older requests go first. When blocks run out the youngest running request is sent back to wait and
later computes its tokens again; the oldest is never sent back, so the whole always moves on.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from nagara.engine.blocks import BlockPool, chain_hash
from nagara.engine.chunks import ChunkBudget
from nagara.engine.errors import ContextLengthError, EngineError
from nagara.engine.request import FinishReason
from nagara.engine.sequence import Run, Sequence, Stage, StepPlan


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold."""

    max_concurrency: int  # sequences with a slot
    max_rows: int  # rows of one step
    chunk_rows: int  # prefill rows of one step, all sequences together
    context_weight: float = 0.0  # work of a row's looking at one token, measured in rows


class Outcome(NamedTuple):
    """What a step's result means for one sequence."""

    sequence: Sequence
    token_id: int
    sample: int  # index among the step's samples
    finish_reason: FinishReason | None
    is_end_token: bool


class Scheduler:
    """Owns every sequence and the block pool."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by arrival, oldest first
        self._free_slots = list(range(limits.max_concurrency - 1, -1, -1))
        self._leaving: list[tuple[int, list[int], int]] = []  # (last step, blocks, slot)
        self._planned_steps = 0
        self._committed_steps = 0
        self.preemptions = 0
        self.cache_hits = 0  # tokens
        self.cache_asked = 0

    # Commands

    def check_fits(self, length: int) -> None:
        """Refuse a sequence that the whole pool could not hold.

        Raises:
            ContextLengthError
        """
        room = self.pool.count * self.pool.size
        if length > room:
            raise ContextLengthError(
                f"the cache holds {room} tokens; the request may need {length}", where="max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence at once; what a step in flight still uses is released later."""
        if sequence.stage is Stage.ENDED:
            return
        if sequence.stage is Stage.RUNNING:
            self.running.remove(sequence)
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.stage = Stage.ENDED
        sequence.epoch += 1
        sequence.finish_reason = reason

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self._leaving)

    def everyone(self) -> Iterable[Sequence]:
        return [*self.running, *self.waiting]

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before another commit."""
        index = self._planned_steps
        runs: list[Run] = []
        rows = 0
        preempted = self.preemptions
        # One row each for those who generate, then prefill with what is left of the step
        prefilling = []
        for sequence in list(self.running):
            left = sequence.rows_left
            if left > 1:
                prefilling.append(sequence)
            elif left and rows < self.limits.max_rows and self._has_room(sequence, 1):
                runs.append(self._run(sequence, index, 1))
                rows += 1
        budget = self._chunk_budget(rows)
        for sequence in prefilling:
            start = sequence.planned
            count = min(sequence.rows_left, budget.rows_at(start))
            if count > 0 and self._has_room(sequence, count):
                runs.append(self._run(sequence, index, count))
                budget.take(count, start)
        while self.waiting and self.preemptions == preempted:
            if budget.is_spent or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            start = sequence.planned
            count = min(sequence.rows_left, budget.rows_at(start))
            runs.append(self._run(sequence, index, count))
            budget.take(count, start)
        if self.preemptions != preempted:
            runs = [run for run in runs if run.is_current]
        if not runs:
            return None
        self._planned_steps += 1
        return StepPlan(index, tuple(runs))

    def _chunk_budget(self, rows: int) -> ChunkBudget:
        """Prefill beside `rows` generating ones; the context counts only if someone waits."""
        limits = self.limits
        is_anyone_waiting = any(sequence.outputs_planned for sequence in self.running)
        weight = limits.context_weight if is_anyone_waiting else 0.0
        return ChunkBudget(limits.max_rows - rows, limits.chunk_rows, weight)

    def _run(self, sequence: Sequence, index: int, count: int) -> Run:
        start = sequence.planned
        samples = start + count == sequence.known_length
        run = Run(
            sequence=sequence,
            epoch=sequence.epoch,
            slot=sequence.slot,
            start=start,
            rows=count,
            samples=samples,
            carries=start + count > len(sequence.tokens),
            is_first=sequence.last_step < 0,
        )
        sequence.planned += count
        sequence.outputs_planned += samples
        sequence.step_before, sequence.last_step = sequence.last_step, index
        return run

    def _has_room(self, sequence: Sequence, count: int) -> bool:
        """Whether `count` rows more may be planned; takes the blocks they need."""
        if sequence.stage is not Stage.RUNNING:
            return False  # sent back while this plan was made
        length = sequence.planned + count
        return length <= len(sequence.blocks) * self.pool.size or self._grow(sequence, length)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Give the sequence blocks for `length` tokens, at the expense of younger ones."""
        missing = self.pool.blocks_for(length) - len(sequence.blocks)
        while missing > self.pool.available:
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                return False  # what it needs is still held by steps in flight
            self._preempt(victim)
            if victim is sequence:
                return False
            if victim.last_step >= self._committed_steps:
                return False  # the victim's blocks come free with its step
        sequence.blocks.extend(self.pool.take() for _ in range(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.last_step == self._planned_steps:
            # Its run in the plan being made is dropped, so that step will not touch it
            sequence.last_step = sequence.step_before
        self.running.remove(sequence)
        self._leave(sequence)
        sequence.stage = Stage.WAITING
        sequence.epoch += 1
        sequence.outputs_planned = sequence.outputs_known
        sequence.planned = sequence.committed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, its cached prefix and blocks for all its tokens."""
        if not self._free_slots:
            return False
        shared, names = self._cached_prefix(sequence)
        needed = self.pool.blocks_for(len(sequence.tokens)) - len(shared)
        idle = sum(self.pool.is_idle(block) for block in shared)
        if needed > self.pool.available - idle:
            return False
        for block in shared:
            self.pool.share(block)
        sequence.blocks = shared + [self.pool.take() for _ in range(needed)]
        sequence.names = names
        sequence.planned = sequence.committed = len(shared) * self.pool.size
        if sequence.epoch == 0:
            sequence.cached_tokens = sequence.planned
            self.cache_hits += sequence.planned
            self.cache_asked += len(sequence.tokens)
        sequence.slot = self._free_slots.pop()
        sequence.last_step = -1
        sequence.stage = Stage.RUNNING
        self._insert_by_age(sequence)
        return True

    def _insert_by_age(self, sequence: Sequence) -> None:
        at = len(self.running)
        while at and self.running[at - 1].key > sequence.key:
            at -= 1
        self.running.insert(at, sequence)

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """Blocks that hold the sequence's beginning already; its last token is always computed."""
        blocks: list[int] = []
        names: list[bytes] = []
        size, parent = self.pool.size, b""
        for end in range(size, len(sequence.tokens), size):
            parent = chain_hash(parent, sequence.tokens[end - size : end])
            block = self.pool.find(parent)
            if block is None:
                break
            blocks.append(block)
            names.append(parent)
        return blocks, names

    def _leave(self, sequence: Sequence) -> None:
        """Give slot and blocks back, at once or with the last step that uses them."""
        blocks, sequence.blocks = sequence.blocks, []
        slot, sequence.slot = sequence.slot, -1
        if sequence.last_step < self._committed_steps:
            self._release(blocks, slot)
        else:
            self._leaving.append((sequence.last_step, blocks, slot))

    def _release(self, blocks: list[int], slot: int) -> None:
        self.pool.release(blocks)
        self._free_slots.append(slot)

    # Committing

    def commit(self, plan: StepPlan, tokens: Items[int]) -> list[Outcome]:
        """Apply a step's sampled tokens, one for each run that samples, in order.

        Raises:
            EngineError: steps are committed out of order.
        """
        if plan.index != self._committed_steps:
            raise EngineError(f"step {plan.index} committed before step {self._committed_steps}")
        outcomes = []
        sample = 0
        for run in plan.runs:
            if run.is_current:
                run.sequence.committed = run.start + run.rows
                if run.samples:
                    outcomes.append(self._accept(run.sequence, tokens[sample], sample))
                if run.sequence.committed // self.pool.size > len(run.sequence.names):
                    self._publish(run.sequence)
            sample += run.samples
        self._committed_steps += 1
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self.end(outcome.sequence, outcome.finish_reason)
        staying = []
        for last_step, blocks, slot in self._leaving:
            if last_step < self._committed_steps:
                self._release(blocks, slot)
            else:
                staying.append((last_step, blocks, slot))
        self._leaving = staying
        return outcomes

    def _accept(self, sequence: Sequence, token: int, sample: int) -> Outcome:
        sequence.tokens.append(token)
        reason = None
        is_end_token = token in sequence.end_ids
        is_stopped = sequence.watcher is not None and not is_end_token and sequence.watcher(token)
        if is_end_token or is_stopped:
            reason = FinishReason.STOP
        elif sequence.outputs_known >= sequence.params.max_tokens:
            reason = FinishReason.LENGTH
        return Outcome(sequence, token, sample, reason, is_end_token)

    def _publish(self, sequence: Sequence) -> None:
        """Name the blocks that are full of committed, real tokens."""
        size = self.pool.size
        full = min(sequence.committed, len(sequence.tokens)) // size
        while len(sequence.names) < full:
            done = len(sequence.names)
            parent = sequence.names[-1] if sequence.names else b""
            name = chain_hash(parent, sequence.tokens[done * size : (done + 1) * size])
            sequence.names.append(name)
            self.pool.publish(sequence.blocks[done], name)

    def audit(self) -> None:
        """Check that every block and slot is where it should be.

        Raises:
            EngineError: it is not.
        """
        tables = [s.blocks for s in self.running] + [blocks for _, blocks, _ in self._leaving]
        self.pool.audit(tables)
        slots = [s.slot for s in self.running] + [slot for _, _, slot in self._leaving]
        if sorted([*slots, *self._free_slots]) != list(range(self.limits.max_concurrency)):
            raise EngineError("a slot is lost or taken twice")
