"""One request inside the engine, from waiting to ended: its tokens and how far they have come.

Pure. Written by the step thread only.

    tokens                prompt and the outputs known to the host
    ├────────┬──────────┬─────┄┄┄┄
    0    committed   planned  known_length
             rows whose step has been read back
                        rows given to a step: at most `depth` steps ahead of committed
                               one more than `tokens` holds while an output is still on the device
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from nagara.engine.request import FinishReason, SamplingParams


class Stage(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its place in the cache."""

    key: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    receiver: Callable[[Any], None]
    waits_for_host: bool = False  # its next row needs its last token on the host first
    watcher: Callable[[int], bool] | None = None  # told each output; True ends the sequence
    guide: Any = None  # a grammar that masks the next token
    stage: Stage = Stage.WAITING
    epoch: int = 0  # results of a step planned in an older epoch are dropped
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of the full blocks published so far
    planned: int = 0
    committed: int = 0
    outputs_planned: int = 0
    last_step: int = -1  # the latest step that touches its blocks and slot
    step_before: int = -1  # the one before that
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    arrived_s: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def outputs_known(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def known_length(self) -> int:
        """Tokens that exist, counting one that only the device knows."""
        return self.prompt_length + self.outputs_planned

    @property
    def rows_left(self) -> int:
        """Rows that may be planned now. None once the last output is planned: it needs no row."""
        if self.outputs_planned >= self.params.max_tokens:
            return 0
        if self.waits_for_host and self.outputs_planned > self.outputs_known:
            return 0
        return self.known_length - self.planned

    @property
    def is_prefilling(self) -> bool:
        return self.known_length - self.planned > 1


class Run(NamedTuple):
    """Consecutive rows of one sequence in one step, at positions `[start, start + rows)`.

    A tuple, because hundreds are made for each step.
    """

    sequence: Sequence
    epoch: int
    slot: int
    start: int
    rows: int
    samples: bool  # the last row's logits become the token at position start + count
    carries: bool  # the last row's token is known to the device only
    is_first: bool  # of this stay in the slot: the slot's device state is begun anew

    @property
    def is_current(self) -> bool:
        return self.sequence.epoch == self.epoch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes."""

    index: int
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)
