"""A device that is not there: steps take a given time, all host work around them is real.

The model answers with tokens made of each row's position and token, so the same request gets the
same answer at every depth. Used to measure how much of the host's work hides behind the device.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nagara.engine.blocks import BlockPool
from nagara.engine.config import ModelConfig
from nagara.engine.core import Core
from nagara.engine.graph_shapes import GraphShapes
from nagara.engine.graphs import GraphMaker
from nagara.engine.inputs import Capacity, StepInputs
from nagara.engine.model import StepModel
from nagara.engine.request import SamplingParams
from nagara.engine.rope_config import RopeConfig
from nagara.engine.runner import Graphing, Runner
from nagara.engine.scheduler import Limits, Scheduler
from nagara.engine.sequence import Sequence
from nagara.engine.streams import Device, SimulatedStream, simulated_device

VOCAB = 32000


def simulated_config(vocab: int = VOCAB) -> ModelConfig:
    """A configuration whose sizes only the engine reads."""
    return ModelConfig(
        model_type="simulated",
        layers=1,
        hidden=16,
        heads=1,
        kv_heads=1,
        head_dim=16,
        intermediate=16,
        vocab=vocab,
        context=1 << 20,
        norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        tied_head=True,
        dtype="float32",
    )


class SimulatedModel:
    """Answers at once: the next token is a mixture of the last one and its position.

    It also reads its cache: what it mixes in is what the sequence's own blocks hold, so a step
    that reads or writes another sequence's blocks changes the answer.
    """

    kernel = "simulated"
    is_graphable = True
    is_batch_invariant = True

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.rows_seen: list[int] = []
        self._cache = torch.empty(0)

    def make_cache(self, blocks: int, block_size: int) -> None:
        self._cache = torch.full((blocks * block_size,), -1, dtype=torch.int64)
        self._block_size = block_size

    def drop_cache(self) -> None:
        self._cache = torch.empty(0)

    def clear_cache(self) -> None:
        self._cache.fill_(-1)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits with one peak and a flat rest."""
        size, table = self._block_size, inputs.table.long()
        self.rows_seen.append(len(inputs.ids))
        places = table[inputs.row_run, inputs.positions // size] * size + inputs.positions % size
        self._cache[places] = inputs.ids * 31 + inputs.positions
        logits = torch.ones(len(inputs.sample_rows), self.config.vocab)
        runs = inputs.row_run[inputs.sample_rows]
        positions = inputs.positions[inputs.sample_rows]
        depth = torch.arange(4)
        # The last token and the three before it, as the cache has them
        back = (positions[:, None] - depth).clamp(min=0)
        seen = self._cache[table[runs[:, None], back // size] * size + back % size]
        mixed = (seen * torch.tensor([1, 7, 11, 13])).sum(-1)
        best = (mixed * 2654435761 + positions * 97) % self.config.vocab
        logits.scatter_(1, best[:, None], 10.0)
        return logits


class InstantModel(SimulatedModel):
    """The same without reading its cache: beside the host's own work it costs little."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        rows = len(inputs.sample_rows)
        ids, positions = inputs.ids[inputs.sample_rows], inputs.positions[inputs.sample_rows]
        best = (ids * 31 + positions * 97) % self.config.vocab
        logits = torch.zeros(rows, self.config.vocab)
        return logits.scatter_(1, best[:, None], 10.0)


@dataclass(frozen=True, slots=True)
class OverlapRun:
    """One depth's result."""

    tokens: list[list[int]]
    wall_s: float
    device_busy: float
    host_ms_per_step: float
    host_hidden_ms_per_step: float
    steps: int

    def fields(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "device_busy": self.device_busy,
            "host_ms_per_step": self.host_ms_per_step,
            "host_hidden_ms_per_step": self.host_hidden_ms_per_step,
            "steps": self.steps,
        }


def build_core(
    model: StepModel,
    device: Device,
    depth: int,
    *,
    slots: int,
    blocks: int,
    block_size: int = 16,
    chunk_rows: int = 256,
    context_weight: float = 0.0,
    context: int = 4096,
    graphs: GraphMaker | None = None,
    is_checking: bool = False,
    is_caching: bool = True,
) -> Core:
    """A core without an engine around it, for measuring and for tests."""
    model.make_cache(blocks + (graphs is not None), block_size)
    pool = BlockPool(blocks, block_size, is_caching=is_caching)
    rows = slots + chunk_rows
    scheduler = Scheduler(pool, Limits(slots, rows, chunk_rows, context_weight))
    capacity = Capacity(rows, slots, pool.blocks_for(context) + 1)
    graphing = None
    if graphs is not None:
        graphing = Graphing(GraphShapes(slots, capacity.blocks_per_run, blocks), graphs)
    runner = Runner(
        model,
        device,
        capacity,
        block_size=block_size,
        graphing=graphing,
        is_checking=is_checking,
    )
    return Core(scheduler, runner, depth, is_checking=is_checking)


def make_sequence(
    key: int, prompt: list[int], params: SamplingParams, end_ids: frozenset[int] = frozenset()
) -> Sequence:
    return Sequence(
        key=key,
        tokens=list(prompt),
        prompt_length=len(prompt),
        params=params,
        seed=params.seed or 0,
        end_ids=end_ids,
        receiver=lambda _: None,
        waits_for_host=params.needs_host,
    )


def run_overlap(depth: int, step_s: Callable[[int], float], batch: int, tokens: int) -> OverlapRun:
    """Generate `tokens` for each of `batch` requests on a simulated device, in real time.

    Args:
        step_s: seconds of one step, given its number of requests.
    """
    stream = SimulatedStream(lambda: step_s(batch))
    draw = random.Random(0)  # noqa: S311  not for secrets
    context = tokens + 64
    blocks = batch * (-(-context // 16) + 1)
    core = build_core(
        InstantModel(simulated_config(64)),
        simulated_device(stream),
        depth,
        slots=batch,
        blocks=blocks,
        context=context,
        chunk_rows=32 * batch,
    )
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    sequences = [
        make_sequence(i, [draw.randrange(64) for _ in range(draw.randrange(8, 32))], params)
        for i in range(batch)
    ]
    started = time.perf_counter()
    for sequence in sequences:
        core.scheduler.add(sequence)
    while core.has_work:
        core.step()
    wall_s = time.perf_counter() - started
    times = core.times
    span = stream.marks[-1][1] - stream.marks[0][0]
    busy_s = stream.busy_s()
    hidden_s = max(0.0, times.host_s - max(0.0, wall_s - busy_s))
    return OverlapRun(
        tokens=[sequence.outputs for sequence in sequences],
        wall_s=wall_s,
        device_busy=busy_s / span,
        host_ms_per_step=times.host_s / times.steps * 1e3,
        host_hidden_ms_per_step=hidden_s / times.steps * 1e3,
        steps=times.steps,
    )
