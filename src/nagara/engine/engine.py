"""The engine: takes prompts, computes their tokens in turns, hands them out as they come.

Two sides meet here. The *step thread* owns the model, the caches and the sequences; every other
thread or task only puts commands into its inbox (`submit`, `cancel`, `close`) and receives tokens
through the callback it gave. Text is made on the receiving side, so the step thread never waits
for a tokenizer.

Each turn computes one chunk of one sequence, and turns go round: every request moves on, and a
request's tokens do not depend on what runs beside it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nagara.engine.config import ModelConfig, parse_model_config
from nagara.engine.errors import ContextLengthError, EngineError, RequestError
from nagara.engine.flat import FlatModel
from nagara.engine.modelfolder import check_model_folder, read_json_object
from nagara.engine.request import FinishReason, SamplingParams, TokenLogprob, fresh_seed
from nagara.engine.sampling import adjust, draw, logprob_of
from nagara.engine.weights import MappedWeights, pick_dtype

log = logging.getLogger("nagara.engine")

CHUNK_ROWS = 256  # prefill rows of one turn: bounds how long the others wait


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine runs; a value that it cannot honour is refused at start."""

    dtype: str = "auto"
    max_concurrency: int = 16  # sequences with a cache at once; more wait their turn
    context: int | None = None  # at most the model's own
    is_compiled: bool = False


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What the step thread tells a request's owner: one token, the end, or both."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: EngineError | None = None


Receiver = Callable[[TokenEvent], None]  # called on the step thread; must not block


@dataclass(slots=True)
class Job:
    """One running or waiting request, owned by the step thread."""

    key: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    receiver: Receiver
    output: list[int] = field(default_factory=list)
    cache: torch.Tensor | None = None
    computed: int = 0  # tokens whose keys and values are in the cache


class Engine:
    """One model on one device."""

    def __init__(self, folder: str | Path, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        started = time.monotonic()
        checked = check_model_folder(folder)
        generation_file = checked.path / "generation_config.json"
        generation = read_json_object(generation_file) if generation_file.exists() else None
        self.config: ModelConfig = parse_model_config(checked.config, generation)
        self.context = min(self.settings.context or self.config.context, self.config.context)
        dtype = pick_dtype(self.settings.dtype, self.config.dtype)
        weights = MappedWeights(checked, dtype)
        self._model = FlatModel(self.config, weights, dtype)
        if self.settings.is_compiled:
            self._model.compile()
        log.info(
            "model mapped in %.2f s: %s, %d layers, %s, %.0f MB of weights, %.0f MB of them copied",
            time.monotonic() - started,
            self.config.model_type,
            self.config.layers,
            str(dtype).removeprefix("torch."),
            checked.weight_bytes / 1e6,
            weights.copied_bytes / 1e6,
        )
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._cancelled: set[int] = set()
        self._is_closing = False
        self._next_key = 0
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    # Any thread

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every request and the step thread; False if a step was still running by then."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, prompt: Sequence[int], params: SamplingParams, receiver: Receiver) -> int:
        """Queue a request; the returned key cancels it.

        Raises:
            RequestError: it can never run as asked.
        """
        self.check(prompt, params)
        seed = fresh_seed() if params.seed is None else params.seed
        with self._wake:
            if self._is_closing:
                raise EngineError("the engine is closing")
            key = self._next_key
            self._next_key += 1
            self._inbox.append(Job(key, list(prompt), params, seed, receiver))
            self._wake.notify()
        return key

    def cancel(self, key: int) -> None:
        """End a request; its receiver gets a last event. Unknown and ended keys are let be."""
        with self._wake:
            self._cancelled.add(key)
            self._wake.notify()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what can never run.

        Raises:
            RequestError: empty prompt, an id out of range, or longer than the context.
        """
        vocab = self.config.vocab
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt")
        if not all(0 <= token < vocab for token in prompt):
            raise RequestError(f"token ids must be in [0, {vocab})", where="prompt")
        named = [*params.stop_token_ids, *(token for token, _ in params.logit_bias)]
        if not all(0 <= token < vocab for token in named):
            raise RequestError(
                f"token ids in stop_token_ids and logit_bias must be in [0, {vocab})",
                where="logit_bias" if params.logit_bias else "stop_token_ids",
            )
        if len(prompt) + params.max_tokens > self.context:
            raise ContextLengthError(
                f"the model's context is {self.context} tokens; the request asks for "
                f"{len(prompt)} in the prompt and {params.max_tokens} new ones",
                where="max_tokens",
            )

    # The step thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
        except Exception:  # the thread's root: nobody above it could report
            log.exception("the step thread failed")
            self._end_all(EngineError("the engine failed; see its log"))
        else:
            self._end_all(None)

    def _take_commands(self) -> bool:
        with self._wake:
            while not (self._inbox or self._running or self._cancelled or self._is_closing):
                self._wake.wait()
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            for queue in (self._waiting, self._running):
                for sequence in [s for s in queue if s.key in cancelled]:
                    queue.remove(sequence)
                    sequence.receiver(TokenEvent(None, finish_reason=FinishReason.CANCELLED))
        while self._waiting and len(self._running) < self.settings.max_concurrency:
            self._running.append(self._waiting.popleft())
        return not self._is_closing

    def _turn(self) -> None:
        """One chunk of the sequence whose turn it is."""
        if not self._running:
            return
        sequence = self._running.popleft()
        tokens = sequence.prompt + sequence.output
        if sequence.cache is None:
            sequence.cache = self._model.new_cache(len(tokens) + sequence.params.max_tokens)
        end = min(len(tokens), sequence.computed + CHUNK_ROWS)
        rows = torch.tensor(tokens[sequence.computed : end])
        logits = self._model.forward(rows, sequence.computed, sequence.cache)
        sequence.computed = end
        if end < len(tokens) or not self._emit(sequence, logits):
            self._running.append(sequence)

    def _emit(self, sequence: Job, logits: torch.Tensor) -> bool:
        """Draw a token, hand it out, and say whether the sequence has ended."""
        params = sequence.params
        ends = params.stop_token_ids if params.ignore_eos else self._end_ids(params)
        adjusted = adjust(logits, params, sequence.prompt, sequence.output, ends)
        token = draw(adjusted, params, sequence.seed, sequence.computed)
        logprob = None
        if params.logprobs is not None:
            logprob = logprob_of(adjusted, token, params.logprobs)
        sequence.output.append(token)
        reason = None
        if token in ends:
            reason = FinishReason.STOP
        elif len(sequence.output) >= params.max_tokens:
            reason = FinishReason.LENGTH
        sequence.receiver(TokenEvent(token, logprob, reason))
        return reason is not None

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return (*self.config.eos_ids, *params.stop_token_ids)

    def _end_all(self, error: EngineError | None) -> None:
        with self._wake:
            self._is_closing = True
            left = [*self._running, *self._waiting, *self._inbox]
            self._inbox.clear()
        self._running.clear()
        self._waiting.clear()
        for sequence in left:
            sequence.receiver(TokenEvent(None, None, FinishReason.CANCELLED, error))
