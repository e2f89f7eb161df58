"""Measures the engine on a fixed work: 32 random prompts of 32 to 127 tokens, 128 new tokens each.

The bound is what the linear layers alone would allow if their weights were packed by the vendor's
library and everything else took no time; it is measured in the same run, at the same numbers of
rows. Runs in the caller's thread, with an engine of its own.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nagara.engine.config import ModelConfig
from nagara.engine.engine import Engine
from nagara.engine.errors import EngineError
from nagara.engine.events import TokenEvent
from nagara.engine.request import SamplingParams
from nagara.engine.settings import EngineSettings

PROMPTS = 32
NEW_TOKENS = 128
LONG_PROMPT = 1024  # of the request that arrives while the others generate

Note = Callable[[str], None]


@dataclass
class Clocked:
    """When a request was sent and when its tokens came."""

    sent_s: float = field(default_factory=time.perf_counter)
    came_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: EngineError | None = None

    def receive(self, event: TokenEvent) -> None:
        if event.token_id is not None:
            self.came_s.append(time.perf_counter())
            self.tokens.append(event.token_id)
        if event.finish_reason is not None:
            self.error = event.error
            self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


def make_prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    """The prompts of the work, the same each time."""
    draw = random.Random(seed)  # noqa: S311  not for secrets
    top = min(40000, vocab)
    return [
        [draw.randrange(min(100, top // 2), top) for _ in range(draw.randrange(32, 128))]
        for _ in range(PROMPTS)
    ]


def run_bench(folder: Path, settings: EngineSettings, runs: int, note: Note) -> dict[str, Any]:
    """Throughput against its bound, waiting times, memory.

    Raises:
        EngineError: the model cannot be run, or not on the CPU.
    """
    engine = Engine(folder, settings)
    engine.start()
    try:
        prompts = make_prompts(engine.config.vocab)
        bound = LinearBound(engine.config, sum(map(len, prompts)), settings.chunk_rows)
        _throughput(engine, prompts)  # touches every page once
        speeds, bounds = [], []
        for i in range(runs):
            bounds.append(bound.tokens_per_s())
            speeds.append(_throughput(engine, prompts))
            note(f"run {i + 1}/{runs}: {speeds[-1]:.0f} tok/s, bound {bounds[-1]:.0f}")
        del bound
        waits = []
        for i in range(runs):
            # Other prompts each time: nothing of them is in the prefix cache
            waits.append(_waits(engine, make_prompts(engine.config.vocab, seed=i + 1)))
            note(
                f"waits {i + 1}/{runs}: longest gap {waits[-1]['gap_max_in_prefill_ms']:.0f} ms, "
                f"allowed {waits[-1]['gap_allowed_ms']:.0f}"
            )
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "kernel": stats.kernel,
        "depth": stats.depth,
        "threads": torch.get_num_threads(),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "runs": runs,
        "tok_s": statistics.median(speeds),
        "tok_s_min": min(speeds),
        "tok_s_max": max(speeds),
        "bound_tok_s": statistics.median(bounds),
        "ratio": statistics.median(s / b for s, b in zip(speeds, bounds, strict=True)),
        **{name: statistics.median(wait[name] for wait in waits) for name in waits[0]},
        "gap_ratio_max": max(wait["gap_ratio"] for wait in waits),
        "device_busy": stats.device_busy,
        "host_ms_per_step": stats.host_ms_per_step,
        "host_hidden_ms_per_step": stats.host_hidden_ms_per_step,
        "rss_bytes": _memory("VmRSS"),
        "rss_anonymous_bytes": _memory("RssAnon"),
    }


def _send(engine: Engine, prompt: list[int], new: int) -> Clocked:
    clocked = Clocked()
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    engine.submit(prompt, params, clocked.receive)
    return clocked


def _throughput(engine: Engine, prompts: list[list[int]]) -> float:
    started = time.perf_counter()
    sent = [_send(engine, prompt, NEW_TOKENS) for prompt in prompts]
    for clocked in sent:
        clocked.wait()
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - started)


def _waits(engine: Engine, prompts: list[list[int]]) -> dict[str, float]:
    """Time to first token, and gaps between tokens while a long prompt is taken in.

    Allowed is a gap of two steps of decoding and the time that a chunk itself takes: what the
    median chunk adds to a step.
    """
    sent = [_send(engine, prompt, NEW_TOKENS) for prompt in prompts[:-1]]
    firsts = []
    while any(not clocked.came_s for clocked in sent):
        time.sleep(0.001)
    room = engine.context - 1
    arrived_s = time.perf_counter()
    late = _send(engine, (prompts[-1] * 40)[: min(LONG_PROMPT, room)], 1)
    late.wait()
    for clocked in sent:
        clocked.wait()
        firsts.append(clocked.came_s[0] - clocked.sent_s)
    calm: list[float] = []
    disturbed: list[float] = []
    for clocked in sent:
        for before, after in zip(clocked.came_s, clocked.came_s[1:], strict=False):
            is_disturbed = after > arrived_s and before < late.came_s[0]
            (disturbed if is_disturbed else calm).append(after - before)
    gaps = sorted([*calm, *disturbed])
    step_ms = statistics.median(calm) * 1e3
    chunk_ms = statistics.median(disturbed or [0.0]) * 1e3 - step_ms
    longest_ms = max(disturbed, default=0.0) * 1e3
    allowed_ms = 2 * step_ms + max(0.0, chunk_ms)
    return {
        "ttft_p50_ms": statistics.median(firsts) * 1e3,
        "late_ttft_ms": (late.came_s[0] - late.sent_s) * 1e3,
        "gap_p50_ms": step_ms,
        "gap_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "gap_max_in_prefill_ms": longest_ms,
        "gap_allowed_ms": allowed_ms,
        "gap_ratio": longest_ms / allowed_ms,
    }


class LinearBound:
    """The linear layers of a model alone, packed, with random weights of its shapes."""

    def __init__(self, config: ModelConfig, prompt_tokens: int, chunk_rows: int) -> None:
        c = config
        attention = (c.heads + 2 * c.kv_heads) * c.head_dim
        shapes = [
            (attention, c.hidden),
            (c.hidden, c.heads * c.head_dim),
            (2 * c.intermediate, c.hidden),
            (c.hidden, c.intermediate),
        ] * c.layers
        self._weights = [self._pack(*shape) for shape in shapes]
        self._head = self._pack(c.vocab, c.hidden)
        self._prompt_tokens, self._chunk_rows = prompt_tokens, chunk_rows

    def tokens_per_s(self) -> float:
        """New tokens per second if the work were these products only."""
        chunks = self._prompt_tokens / self._chunk_rows
        total_s = chunks * self._time(self._chunk_rows, 1) + (NEW_TOKENS - 1) * self._time(
            PROMPTS, 5
        )
        return PROMPTS * NEW_TOKENS / total_s

    def _time(self, rows: int, repeats: int) -> float:
        inputs = {w[1]: torch.randn(rows, w[1]).bfloat16() for w in [*self._weights, self._head]}
        samples = inputs[self._head[1]][:PROMPTS]
        times = []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                started = time.perf_counter()
                for weight, size in self._weights:
                    self._multiply(inputs[size], weight)
                self._multiply(samples, self._head[0])
                times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    @staticmethod
    def _pack(outputs: int, inputs: int) -> tuple[torch.Tensor, int]:
        weight = torch.randn(outputs, inputs).bfloat16()
        return torch.ops.mkldnn._reorder_linear_weight(weight, None), inputs

    @staticmethod
    def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
