"""What a step reads and writes: two sets of buffers, used in turn.

A set has host buffers (pinned on CUDA) and device buffers. The host fills a set only after the
event that says its last step's results are out, so nothing is rewritten under its reader. Filled
and read by the step thread; copied by the transfer streams.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nagara.engine.graph_shapes import GraphShape
from nagara.engine.request import MAX_TOP_LOGPROBS
from nagara.engine.sampling import uniform
from nagara.engine.sequence import Sequence, StepPlan
from nagara.engine.streams import Device, Event

POISON = -(1 << 40)  # what unread result places hold while the engine checks itself


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step."""

    rows: int
    runs: int  # also the most samples
    blocks_per_run: int


class RunShape(NamedTuple):
    """A run as the model sees it: rows `[first, first + rows)`, positions from `start`."""

    first: int
    rows: int
    start: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's device tensors. `table[run]` lists the run's blocks by position."""

    ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    row_run: torch.Tensor  # [rows] int64
    table: torch.Tensor  # [runs, blocks] int32
    sample_rows: torch.Tensor  # [samples] int64
    runs: tuple[RunShape, ...]


class BufferSet:
    """One of the two sets; `index` tells which."""

    def __init__(self, capacity: Capacity, device: Device, index: int = 0) -> None:
        self.index = index

        def both(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            pinned = device.has_pinned_memory
            host = torch.zeros(*shape, dtype=dtype, pin_memory=pinned)
            return host, torch.zeros(*shape, dtype=dtype, device=device.torch_device)

        self.rows, self.device_rows = both(4, capacity.rows, dtype=torch.int64)
        self.table, self.device_table = both(
            capacity.runs, capacity.blocks_per_run, dtype=torch.int32
        )
        self.samples, self.device_samples = both(2, capacity.runs, dtype=torch.int64)
        self.numbers, self.device_numbers = both(4, capacity.runs, dtype=torch.float64)
        self.tokens, self.device_tokens = both(capacity.runs, dtype=torch.int64)
        width = MAX_TOP_LOGPROBS + 1
        self.logprobs, self.device_logprobs = both(capacity.runs, width, dtype=torch.float32)
        self.top_ids, self.device_top_ids = both(capacity.runs, width, dtype=torch.int64)
        self._rows_np = self.rows.numpy()
        self._table_np = self.table.numpy()
        self._samples_np = self.samples.numpy()
        self._numbers_np = self.numbers.numpy()
        self.in_use: Event | None = None
        self.shapes: tuple[RunShape, ...] = ()
        self.row_count = self.width = self.sample_count = 0

    def fill(self, plan: StepPlan, tables: "BlockTables") -> None:
        """Write a plan's rows. The set must not be in use."""
        if self.in_use is not None:
            self.in_use.wait()
        ids: list[int] = []
        carry: list[int] = []
        positions: list[int] = []
        row_run: list[int] = []
        shapes: list[RunShape] = []
        slots: list[int] = []
        sample_rows: list[int] = []
        sample_slots: list[int] = []
        width = 0
        # Lists first: one conversion for each is cheaper than one array write for each row
        for index, run in enumerate(plan.runs):
            sequence, start, count, slot = run.sequence, run.start, run.rows, run.slot
            shapes.append(RunShape(len(ids), count, start))
            slots.append(slot)
            if run.carries:
                ids += sequence.tokens[start : start + count - 1]
                ids.append(0)
                carry += [-1] * (count - 1)
                carry.append(slot)
            else:
                ids += sequence.tokens[start : start + count]
                carry += [-1] * count
            positions += range(start, start + count)
            row_run += [index] * count
            tables.follow(slot, sequence.blocks, is_new=run.is_first)
            width = max(width, len(sequence.blocks))
            if run.samples:
                if not sequence.params.is_greedy:
                    self._set_numbers(len(sample_rows), sequence, start + count)
                sample_rows.append(len(ids) - 1)
                sample_slots.append(slot)
        self.shapes = tuple(shapes)
        rows, samples = len(ids), len(sample_rows)
        for place, values in enumerate((ids, carry, positions, row_run)):
            self._rows_np[place, :rows] = values
        self._samples_np[0, :samples] = sample_rows
        self._samples_np[1, :samples] = sample_slots
        self._table_np[: len(slots), :width] = tables.rows(slots, width)
        self.row_count, self.width, self.sample_count = rows, width, samples

    def pad(self, shape: GraphShape, block_size: int, spare_block: int) -> None:
        """Make the filled rows, one for each run, as many and as wide as a graph's.

        Padded rows are the first place of a block that nobody owns, and what they sample goes
        nowhere. Every run is said to be as long as the table: the positions tell what it may see.
        """
        rows = slice(self.row_count, shape.rows)
        self._rows_np[0, rows] = 0
        self._rows_np[1, rows] = -1
        self._rows_np[2, rows] = 0
        self._rows_np[3, : shape.rows] = range(shape.rows)
        self._table_np[: self.row_count, self.width : shape.blocks] = spare_block
        self._table_np[rows, : shape.blocks] = spare_block
        self._samples_np[0, : shape.rows] = range(shape.rows)
        last = shape.blocks * block_size - 1
        self.shapes = tuple(RunShape(i, 1, last) for i in range(shape.rows))
        self.row_count = self.sample_count = shape.rows
        self.width = shape.blocks

    def _set_numbers(self, sample: int, sequence: Sequence, position: int) -> None:
        params = sequence.params
        draw = uniform(sequence.seed, position)
        values = (params.temperature, params.top_p, params.min_p, draw)
        self._numbers_np[:, sample] = values

    def copy_in(self) -> None:
        """Host to device; a copy on CPU too: device work never reads what the host writes."""
        rows, runs, samples = self.row_count, len(self.shapes), self.sample_count
        self.device_rows[:, :rows].copy_(self.rows[:, :rows], non_blocking=True)
        self.device_table[:runs, : self.width].copy_(
            self.table[:runs, : self.width], non_blocking=True
        )
        self.device_samples[:, :samples].copy_(self.samples[:, :samples], non_blocking=True)
        self.device_numbers[:, :samples].copy_(self.numbers[:, :samples], non_blocking=True)

    def copy_out(self, samples: int, *, has_logprobs: bool) -> None:
        self.tokens[:samples].copy_(self.device_tokens[:samples], non_blocking=True)
        if has_logprobs:
            self.logprobs[:samples].copy_(self.device_logprobs[:samples], non_blocking=True)
            self.top_ids[:samples].copy_(self.device_top_ids[:samples], non_blocking=True)

    def inputs(self, last_token: torch.Tensor) -> StepInputs:
        """The device's view, tokens that only the device knows taken from `last_token[slot]`.

        Row -1 of `last_token` is nobody's slot: rows that carry nothing point there.
        """
        rows, runs = self.row_count, len(self.shapes)
        ids, carry, positions, row_run = self.device_rows[:, :rows]
        return StepInputs(
            ids=torch.where(carry >= 0, last_token[carry], ids),
            positions=positions,
            row_run=row_run,
            table=self.device_table[:runs, : self.width],
            sample_rows=self.device_samples[0, : self.sample_count],
            runs=self.shapes,
        )

    def poison(self) -> None:
        self.tokens.fill_(POISON)


class BlockTables:
    """The block table of every slot on the host, extended as sequences grow."""

    def __init__(self, slots: int, blocks_per_run: int) -> None:
        self._table = np.zeros((slots, blocks_per_run), dtype=np.int32)
        self._filled = [0] * slots

    def follow(self, slot: int, blocks: Items[int], *, is_new: bool) -> None:
        done = 0 if is_new else self._filled[slot]
        if done != len(blocks):
            self._table[slot, done : len(blocks)] = blocks[done:]
            self._filled[slot] = len(blocks)

    def rows(self, slots: Items[int], width: int) -> np.ndarray:
        return self._table[slots, :width]
