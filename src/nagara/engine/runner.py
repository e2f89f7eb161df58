"""Puts plans on the device: fills a buffer set, submits copy, compute, copy, and reads results.

The device keeps `last_token[slot]`: the sampler writes it, the next step's rows take their token
from there, so a step is planned and launched before the one before it has been read.
Host side: the step thread. Device side: `_compute`, on the compute stream.
"""

from dataclasses import dataclass
from functools import partial

import torch

from nagara.engine.errors import EngineError
from nagara.engine.graph_shapes import GraphShape, GraphShapes
from nagara.engine.graphs import GraphMaker, StepGraphs
from nagara.engine.inputs import POISON, BlockTables, BufferSet, Capacity
from nagara.engine.model import StepModel
from nagara.engine.request import TokenLogprob
from nagara.engine.sampling import Faults, History, Sample, Sampler, logprobs_of
from nagara.engine.sequence import Run, StepPlan
from nagara.engine.streams import Device, Event


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight. `out` happens when its results lie in the set's host buffers."""

    plan: StepPlan
    buffers: BufferSet
    out: Event
    samples: tuple[Sample, ...]
    has_logprobs: bool
    faults: Faults  # filled in by the device side


@dataclass(frozen=True, slots=True)
class Graphing:
    """Which steps become graphs, and what captures them."""

    shapes: GraphShapes
    maker: GraphMaker


@dataclass(frozen=True, slots=True)
class Results:
    """What a step brought back, one entry for each sample."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    faults: Faults  # samples whose own code failed: their tokens mean nothing


class Runner:
    """One model on one device with two buffer sets."""

    def __init__(
        self,
        model: StepModel,
        device: Device,
        capacity: Capacity,
        *,
        block_size: int = 16,
        graphing: Graphing | None = None,
        is_checking: bool = False,
    ) -> None:
        self._model = model
        self._device = device
        self._block_size = block_size
        self._shapes = None if graphing is None else graphing.shapes
        self.graphs = None if graphing is None else StepGraphs(graphing.maker)
        self._sets = (BufferSet(capacity, device, 0), BufferSet(capacity, device, 1))
        self._tables = BlockTables(capacity.runs, capacity.blocks_per_run)
        # One place more than slots: rows that carry nothing look there
        self._last_token = torch.zeros(
            capacity.runs + 1, dtype=torch.int64, device=device.torch_device
        )
        self._sampler = Sampler(capacity.runs, model.config.vocab, device.torch_device)
        device.settle()  # the streams start from finished buffers and weights
        self._is_checking = is_checking
        if is_checking:
            for buffers in self._sets:
                buffers.poison()

    def launch(self, plan: StepPlan) -> Launched:
        """Submit a step; returns at once where the device works beside the host."""
        buffers = self._sets[plan.index % 2]
        buffers.fill(plan, self._tables)
        shape = None if self._shapes is None else self._shapes.choose(plan)
        if shape is not None:
            assert self._shapes is not None
            buffers.pad(shape, self._block_size, self._shapes.spare_block)
        samples = tuple(_sample(run) for run in plan.runs if run.samples)
        histories = tuple(
            _history(run) for run in plan.runs if run.is_first and run.sequence.params.has_penalty
        )
        alternatives = max(
            (s.params.logprobs for s in samples if s.params.logprobs is not None), default=None
        )

        faults: Faults = {}
        entered = [run.slot for run in plan.runs if run.is_first] if self._is_checking else []

        def compute() -> None:
            if entered:
                self._last_token[entered] = POISON  # nothing of whoever had the slot before
            self._compute(buffers, shape, samples, histories, alternatives, faults)

        def copy_out() -> None:
            buffers.copy_out(len(samples), has_logprobs=alternatives is not None)

        arrived = self._device.inward.submit(buffers.copy_in)
        computed = self._device.compute.submit(compute, (arrived,))
        out = self._device.outward.submit(copy_out, (computed,))
        buffers.in_use = out
        return Launched(plan, buffers, out, samples, alternatives is not None, faults)

    def capture(self, rows: int) -> None:
        """Capture the graphs of steps with so many rows ahead of need. Nothing may be in flight.

        What runs for it has padded rows only: they touch nothing that anybody owns.
        """
        if self._shapes is None:
            return
        for shape in self._shapes.of_rows(rows):
            for buffers in self._sets:
                buffers.row_count = buffers.width = 0
                buffers.pad(shape, self._block_size, self._shapes.spare_block)
                arrived = self._device.inward.submit(buffers.copy_in)
                work = partial(self._forward, buffers, shape)
                self._device.compute.submit(work, (arrived,)).wait()

    def read(self, step: Launched) -> Results:
        """Wait for a step and take its results. The one place where the host waits.

        Raises:
            EngineError: a result was read that no step has written.
        """
        step.out.wait()
        count = len(step.samples)
        tokens: list[int] = step.buffers.tokens[:count].tolist()
        logprobs: list[TokenLogprob | None] = [None] * count
        if step.has_logprobs:
            logprobs = [_logprob(step, i) for i in range(count)]
        if self._is_checking:
            if POISON in tokens:
                raise EngineError("a token was read before it was written")
            step.buffers.poison()
        return Results(tokens, logprobs, step.faults)

    def _compute(
        self,
        buffers: BufferSet,
        shape: GraphShape | None,
        samples: tuple[Sample, ...],
        histories: tuple[History, ...],
        alternatives: int | None,
        faults: Faults,
    ) -> None:
        with torch.inference_mode():
            for history in histories:
                self._sampler.begin(history)
            if self._is_checking:
                ids = buffers.inputs(self._last_token).ids
                if bool((ids == POISON).any()):
                    raise EngineError("a slot's token was used before it was drawn")
            count = len(samples)
            logits = self._forward(buffers, shape)[:count]
            if not count:
                return
            raw = logits.clone() if alternatives is not None else logits
            numbers = buffers.device_numbers[:, :count]
            tokens = self._sampler.draw(logits, samples, numbers, faults)
            self._last_token[buffers.device_samples[1, :count]] = tokens
            buffers.device_tokens[:count] = tokens
            if alternatives is not None:
                values, ids = logprobs_of(raw, tokens, alternatives)
                buffers.device_logprobs[:count, : alternatives + 1] = values
                buffers.device_top_ids[:count, : alternatives + 1] = ids

    def _forward(self, buffers: BufferSet, shape: GraphShape | None) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._model.forward(buffers.inputs(self._last_token))

        with torch.inference_mode():
            if shape is None or self.graphs is None:
                return work()
            return self.graphs.run(buffers.index, shape, work)


def _sample(run: Run) -> Sample:
    sequence, params = run.sequence, run.sequence.params
    if params.is_simple:
        return Sample(params, run.slot)
    made = run.start + run.rows - sequence.prompt_length  # outputs before this one
    banned: tuple[int, ...] = ()
    if made < params.min_tokens:
        banned = tuple(sequence.end_ids)
    allowed = None if sequence.guide is None else sequence.guide.allowed()
    seen = tuple(sequence.tokens) if params.logits_processors else ()
    return Sample(params, run.slot, banned, allowed, seen)


def _history(run: Run) -> History:
    sequence = run.sequence
    prompt = sequence.tokens[: sequence.prompt_length]
    return History(run.slot, tuple(prompt), tuple(sequence.outputs))


def _logprob(step: Launched, index: int) -> TokenLogprob | None:
    wanted = step.samples[index].params.logprobs
    if wanted is None:
        return None
    values = step.buffers.logprobs[index, : wanted + 1].tolist()
    ids = step.buffers.top_ids[index, : wanted + 1].tolist()
    return TokenLogprob(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))
