"""One request for tokens: what it asks, checked; what comes out, as plain values.

Pure: no torch, no I/O. `SamplingParams` is frozen, so the step loop and the HTTP side may share it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nagara.engine.errors import RequestError

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 64


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"


# Takes the tokens so far (prompt and output) and the next logits `[vocab]`, returns the new logits.
LogitsProcessor = Callable[[tuple[int, ...], Any], Any]


@dataclass(frozen=True, slots=True)
class Guide:
    """A form of the whole output: a JSON schema (as JSON text), a regular expression, a grammar."""

    kind: str  # "json", "regex" or "lark"
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to end.

    Raises:
        RequestError: a value is out of its range; `where` names it.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # end tokens are impossible before that many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the chosen token; None: none at all
    guide: Guide | None = None  # the answer's text must match it entirely
    logits_processors: tuple[LogitsProcessor, ...] = ()
    # Derived once, because each step asks for them
    is_greedy: bool = field(init=False, default=False)
    is_simple: bool = field(init=False, default=False)  # nothing is done to the logits

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be in [0, max_tokens]")
        _check(0 <= self.temperature <= 100, "temperature", "must be in [0, 100]")
        _check(self.top_k >= 0, "top_k", "must be 0 (all) or more")
        _check(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        _check(0 < self.repetition_penalty <= 100, "repetition_penalty", "must be in (0, 100]")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", "must be in [-2, 2]")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must be in [-2, 2]")
        _check(len(self.stop) <= MAX_STOPS, "stop", f"must be at most {MAX_STOPS} strings")
        _check(all(self.stop), "stop", "must not hold an empty string")
        if self.logprobs is not None:
            limit = f"must be in [0, {MAX_TOP_LOGPROBS}]"
            _check(0 <= self.logprobs <= MAX_TOP_LOGPROBS, "logprobs", limit)
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", "must be a 64 bit integer")
        if self.guide is not None:
            rule = "cannot be kept by an answer of a given form: the form says where it ends"
            _check(not self.min_tokens, "min_tokens", rule)
            _check(not self.ignore_eos, "ignore_eos", rule)
        is_simple = not (self.has_penalty or self.logit_bias or self.min_tokens or self.needs_host)
        object.__setattr__(self, "is_greedy", self.temperature == 0)
        object.__setattr__(self, "is_simple", is_simple)

    @property
    def has_penalty(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def needs_host(self) -> bool:
        """Whether the next logits depend on something that only the host can compute."""
        return self.guide is not None or bool(self.logits_processors)


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise RequestError(f"{name} {rule}", where=name)


def fresh_seed() -> int:
    """A seed for a request that brought none; from the kernel, so clones of a process differ."""
    return int.from_bytes(os.urandom(8), "little")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a chosen token and of its best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of one request's answer; the last piece has a `finish_reason`."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_reason: str | int | None = field(default=None)
