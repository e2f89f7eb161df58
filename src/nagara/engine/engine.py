"""The engine: takes prompts, computes their tokens together, hands them out as they come.

Two sides meet here. The *step thread* owns the loop, the scheduler and the sequences; every other
thread or task only puts commands into its inbox and receives tokens through the receiver it gave.
Text is made on the receiving side; the step thread decodes only what has stop strings.

    any thread        submit, cancel, sleep, wake ──► inbox ──► step thread: loop of `Core.step`
    asyncio loop      stream  ◄── Mailbox ◄── receivers ◄──┘        │ submit       ▲ events
    caller's thread   generate ◄── Letterbox ◄┘                     └► device streams
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nagara.engine.answer import AnswerBuilder
from nagara.engine.answer_stream import AnswerStream
from nagara.engine.batch import Batch
from nagara.engine.blocks import BlockPool
from nagara.engine.core import Committed, Core
from nagara.engine.errors import (
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
)
from nagara.engine.events import Receiver, TokenEvent
from nagara.engine.grammar import GrammarMaker
from nagara.engine.graph_shapes import GraphShapes
from nagara.engine.graphs import CudaGraphs
from nagara.engine.inputs import Capacity
from nagara.engine.loading import LoadedModel, load_model
from nagara.engine.mailbox import Letterbox, Mailbox
from nagara.engine.progress import Progress
from nagara.engine.request import FinishReason, Output, SamplingParams, fresh_seed
from nagara.engine.runner import Graphing, Runner
from nagara.engine.scheduler import Limits, Scheduler
from nagara.engine.sequence import Sequence
from nagara.engine.settings import EngineSettings
from nagara.engine.sleeping import Rest, Woken
from nagara.engine.streams import Device, cuda_device, inline_device, worker_device
from nagara.engine.tokenizer import StopFinder, TextBuilder, Tokenizer
from nagara.engine.weight_memory import find_memory_saver

log = logging.getLogger("nagara.engine")

Prompt = str | Items[int]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it started, and what it holds now."""

    kernel: str
    depth: int
    steps: int
    rows: int
    tokens: int
    device_busy: float  # share of the time with work in which the device computed
    host_ms_per_step: float
    host_hidden_ms_per_step: float  # host work that ran while the device computed
    running: int
    waiting: int
    cache_blocks: int
    cache_blocks_held: int
    prefix_hit_share: float  # of all prompt tokens
    preemptions: int
    is_asleep: bool

    @property
    def queue(self) -> int:
        """Requests that have no slot yet."""
        return self.waiting

    @property
    def kv_use(self) -> float:
        """The share of the KV cache that requests hold."""
        return self.cache_blocks_held / self.cache_blocks


class Engine:
    """One model on one device. `start` it, use it from anywhere, `close` it.

    Args:
        folder: a model folder in the Hugging Face layout.
        device: streams to run on instead of those the settings name (for tests and measuring).
    """

    def __init__(
        self,
        folder: str | Path,
        settings: EngineSettings | None = None,
        *,
        device: Device | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        loaded = load_model(Path(folder), self.settings)  # weights come while the rest is made
        self.tokenizer = Tokenizer(Path(folder))
        self._set_up(loaded, device)

    def _set_up(self, loaded: LoadedModel, device: Device | None) -> None:
        s = self.settings
        self._loaded, self._model = loaded, loaded.model
        self.config, self.context = loaded.config, loaded.context
        self._grammars = GrammarMaker(self.tokenizer, self.config.vocab, self.config.eos_ids)
        self._device = device or _make_device(s)
        pool = BlockPool(loaded.blocks, s.block_size, is_caching=s.has_prefix_cache)
        most_rows = s.max_concurrency + s.chunk_rows
        weight = self.config.context_weight
        limits = Limits(s.max_concurrency, most_rows, s.chunk_rows, weight)
        self._scheduler = Scheduler(pool, limits)
        capacity = Capacity(most_rows, s.max_concurrency, pool.blocks_for(self.context) + 1)
        graphing = self._graphing(capacity)
        self._shapes = graphing.shapes if graphing else None
        saver = find_memory_saver() if self._device.torch_device.type == "cuda" else None
        self._rest = Rest(loaded, pool, self._device, s, saver)
        self._rest.make_cache()
        self._woken: Woken | None = None
        runner = Runner(
            self._model,
            self._device,
            capacity,
            block_size=s.block_size,
            graphing=graphing,
            is_checking=s.is_checking,
        )
        self._core = Core(self._scheduler, runner, s.depth, is_checking=s.is_checking)
        self.read = loaded.finish()  # of the weights, at the start or at the latest waking
        self._wake_up = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._by_key: dict[int, Sequence] = {}
        self._mailboxes: dict[int, Mailbox | Letterbox] = {}
        self._next_key = 0
        self._places: set[int] = set()  # keys of those that count; guarded by `_wake_up`
        self._active_s = 0.0
        self._is_closing = self._is_asleep = False
        self._failure: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def _graphing(self, capacity: Capacity) -> Graphing | None:
        """Graphs where the device and the model can; their padded rows get a block of the cache."""
        is_cuda = self._device.torch_device.type == "cuda"
        if not (is_cuda and self.settings.has_graphs and self._model.is_graphable):
            return None
        blocks = self._loaded.blocks
        return Graphing(GraphShapes(capacity.runs, capacity.blocks_per_run, blocks), CudaGraphs())

    # Any thread

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every request and the step thread; False if a step was still running by then."""
        with self._wake_up:
            self._is_closing = True
            self._wake_up.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        is_over = not self._thread.is_alive()
        if is_over:
            self._device.close()
        return is_over

    @property
    def failure(self) -> EngineError | None:
        """Why the engine has ended by itself; it takes nothing any more then."""
        return self._failure

    def join(self) -> EngineError | None:
        """Wait until the step thread has ended, by `close` or by itself; its failure if any."""
        self._thread.join()
        return self._failure

    def submit(self, prompt: Items[int], params: SamplingParams, receiver: Receiver) -> int:
        """Queue a request; the returned key cancels it.

        Raises:
            RequestError: it can never run as asked, or too many wait already.
            EngineError: the engine is closing, asleep, or has failed.
        """
        self.check(prompt, params)
        guide = None if params.guide is None else self._grammars.make(params.guide)
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(self.config.eos_ids)
        with self._wake_up:
            if self._failure is not None:
                raise self._failure
            if len(self._places) >= self.settings.max_concurrency + self.settings.max_waiting:
                raise OverloadedError("too many requests wait already")
            if self._is_closing or self._is_asleep:
                raise EngineError(f"the engine is {'closing' if self._is_closing else 'asleep'}")
            sequence = Sequence(
                key=self._next_key,
                tokens=list(prompt),
                prompt_length=len(prompt),
                params=params,
                seed=fresh_seed() if params.seed is None else params.seed,
                end_ids=frozenset(ends),
                receiver=receiver,
                waits_for_host=params.needs_host,
                watcher=self._watcher(params),
                guide=guide,
                arrived_s=time.monotonic(),
            )
            self._next_key += 1
            self._places.add(sequence.key)
            self._inbox.append(partial(self._add, sequence))
            self._wake_up.notify()
        return sequence.key

    def cancel(self, key: int) -> None:
        """End a request; its receiver gets a last event. Unknown and ended keys are let be.

        Its place is free at once; what it holds of the cache as soon as no step uses that.
        """
        with self._wake_up:
            self._places.discard(key)
        self._command(partial(self._cancel, key))

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """Refuse what can never run.

        Raises:
            RequestError: empty prompt, an id out of range, or longer than the context.
        """
        vocab = self.config.vocab
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt")
        if not all(0 <= token < vocab for token in prompt):
            raise RequestError(f"token ids must be in [0, {vocab})", where="prompt")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            if not all(0 <= token < vocab for token in ids):
                raise RequestError(f"token ids in {name} must be in [0, {vocab})", where=name)
        if len(prompt) + params.max_tokens > self.context:
            raise ContextLengthError(
                f"the context is {self.context} tokens; the request asks for {len(prompt)} in the "
                f"prompt and {params.max_tokens} new ones",
                where="max_tokens",
            )
        self._scheduler.check_fits(len(prompt) + params.max_tokens)

    def stream(self, prompt: Prompt, params: SamplingParams) -> AnswerStream:
        """One request, begun at once, and its answer in pieces. Called in an asyncio loop.

        Raises:
            RequestError: it can never run as asked, or too many wait already.
            EngineError: the engine is closing, asleep, or has failed.
        """
        ids = self._ids(prompt)
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(id(loop))
        if not isinstance(mailbox, Mailbox):
            ended = [key for key, box in self._mailboxes.items() if box.is_over]
            for key in ended:
                self._mailboxes.pop(key, None)
            mailbox = self._mailboxes[id(loop)] = Mailbox(loop)
        letters: asyncio.Queue[TokenEvent] = asyncio.Queue()
        builder = AnswerBuilder(self.tokenizer, params, len(ids))
        number = self.submit(ids, params, partial(mailbox.post, letters))
        return AnswerStream(letters, builder, partial(self.cancel, number))

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams,
        *,
        progress: Progress | bool = False,
    ) -> list[Output]:
        """Whole answers, in the prompts' order.

        Args:
            progress: True draws a bar if standard error is a terminal; a function is called with
                (ended, all) each time a prompt's answer ends.

        Raises:
            RequestError: one of them can never run, and none is computed then; or others hold
                every place of the engine.
            EngineError: the engine failed.
        """
        letters = Letterbox()
        self._mailboxes[id(letters)] = letters
        try:
            ids = [self._ids(prompt) for prompt in prompts]
            return Batch(self, ids, params, letters).run(progress)
        finally:
            del self._mailboxes[id(letters)]

    def stats(self) -> EngineStats:
        """A snapshot; the numbers may be a step apart from each other."""
        times, scheduler = self._core.times, self._scheduler
        steps = max(1, times.steps)
        busy_s = self._device.compute.busy_s()
        idle_s = max(0.0, self._active_s - busy_s)
        return EngineStats(
            kernel=self._model.kernel,
            depth=self._core.depth,
            steps=times.steps,
            rows=times.rows,
            tokens=times.tokens,
            device_busy=min(1.0, busy_s / self._active_s) if self._active_s else 0.0,
            host_ms_per_step=times.host_s / steps * 1e3,
            host_hidden_ms_per_step=max(0.0, times.host_s - idle_s) / steps * 1e3,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_blocks=scheduler.pool.count,
            cache_blocks_held=scheduler.pool.held,
            prefix_hit_share=scheduler.cache_hits / max(1, scheduler.cache_asked),
            preemptions=scheduler.preemptions,
            is_asleep=self._is_asleep,
        )

    @property
    def is_asleep(self) -> bool:
        return self._is_asleep

    def sleep(self, *, releases_weights: bool = False) -> None:
        """Let running requests end as cancelled, then drop the KV cache.

        Weights stay mapped, or on their device; `releases_weights`: not on it, where their memory
        can be given up. They are read again when the engine wakes.
        """
        self._ask(lambda: self._fall_asleep(releases_weights=releases_weights))

    def wake(self) -> Woken | None:
        """Have weights and an empty KV cache again, as large as memory allows; take requests.

        None if it was awake. The engine fails if weights are not what they were.
        """
        self._ask(self._awake)
        return self._woken

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _watcher(self, params: SamplingParams) -> Callable[[int], bool] | None:
        if not params.stop:
            return None
        text, finder = TextBuilder(self.tokenizer), StopFinder(params.stop)

        def sees_stop(token: int) -> bool:
            finder.push(text.push(token))
            return finder.is_found

        return sees_stop

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake_up:
            self._inbox.append(command)
            self._wake_up.notify()

    def _ask(self, command: Callable[[], None]) -> None:
        """Run a command on the step thread and wait until it has run."""
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._command(run)
        while not done.wait(0.1):
            if not self._thread.is_alive():
                raise self._failure or EngineError("the engine is closed")

    # The step thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work:
                    started = time.perf_counter()
                    self._hand_out(self._core.step())
                    self._active_s += time.perf_counter() - started
        except Exception as error:  # the thread's root: nobody above it could report
            log.exception("the step thread failed")
            self._failure = EngineError(f"the engine failed: {error!r}; see its log")
        self._end_all(self._failure)

    def _take_commands(self) -> bool:
        with self._wake_up:
            while not (self._inbox or self._core.has_work or self._is_closing):
                self._wake_up.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        self._flush()
        return not self._is_closing

    def _hand_out(self, committed: list[Committed]) -> None:
        for item in committed:
            sequence, token, _, reason, is_end = item.outcome
            event = TokenEvent(token, item.logprob, reason, is_end)
            if item.error is not None:
                event = TokenEvent(None, None, FinishReason.CANCELLED, error=item.error)
            if event.finish_reason is not None:
                self._leave(sequence.key)
            self._tell(sequence, event)
        self._flush()

    def _tell(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.receiver(event)
        except Exception:  # foreign code: the others' requests go on
            log.exception("a receiver failed; its request is cancelled")
            if self._leave(sequence.key) is not None:
                self._scheduler.end(sequence, FinishReason.CANCELLED)

    def _leave(self, key: int) -> Sequence | None:
        """Give the request's place to another; None when it has been given already."""
        sequence = self._by_key.pop(key, None)
        if sequence is not None:
            with self._wake_up:
                self._places.discard(key)
        return sequence

    def _flush(self) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.flush()

    def _add(self, sequence: Sequence) -> None:
        self._by_key[sequence.key] = sequence
        if self._is_asleep:
            self._leave(sequence.key)
            error = EngineError("the engine is asleep")
            self._tell(sequence, TokenEvent(None, None, FinishReason.CANCELLED, error=error))
            return
        self._scheduler.add(sequence)

    def _cancel(self, key: int) -> None:
        sequence = self._leave(key)
        if sequence is not None:
            self._scheduler.end(sequence, FinishReason.CANCELLED)
            self._tell(sequence, TokenEvent(None, finish_reason=FinishReason.CANCELLED))

    def _fall_asleep(self, *, releases_weights: bool) -> None:
        if self._is_asleep:
            return
        for key in list(self._by_key):
            self._cancel(key)
        self._hand_out(self._core.drain())
        self._rest.fall_asleep(self._core.graphs, releases_weights=releases_weights)
        self._is_asleep = True

    def _awake(self) -> None:
        self._woken = None
        if self._is_asleep:
            self._woken = self._rest.awake(self._core.graphs, self._shapes)
            self.read = self._woken.weights or self.read
            self._is_asleep = False

    def _end_all(self, error: EngineError | None) -> None:
        with self._wake_up:
            self._is_closing = True
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        for key in list(self._by_key):
            sequence = self._leave(key)
            if sequence is not None:
                self._tell(sequence, TokenEvent(None, None, FinishReason.CANCELLED, error=error))
        self._flush()


def _make_device(settings: EngineSettings) -> Device:
    if settings.device == "cuda":
        return cuda_device()
    return worker_device() if settings.depth else inline_device()
