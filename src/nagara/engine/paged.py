"""Attention of a step's rows over the paged cache, in torch operations.

Runs of one row (decode) go together, padded to the longest context among them; runs of several
rows (prefill) go one by one. On this path the last bits of a row may depend on how long its batch
mates are.
"""

from dataclasses import dataclass

import torch

from nagara.engine.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """How dot products become scores."""

    scale: float
    softcap: float | None = None  # scores are bent to stay below it


@dataclass(frozen=True, slots=True)
class _Prefill:
    first: int
    count: int
    tokens: torch.Tensor  # [context]: where the run's tokens lie in the cache
    hidden: torch.Tensor  # bool [rows, context]: True where a row may not look


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's rows are written and what they look at; made once, used by every layer."""

    write_at: torch.Tensor  # [rows]: the token place of each row in the cache
    decode_rows: torch.Tensor | None
    decode_tokens: torch.Tensor | None  # [decode rows, context]
    decode_hidden: torch.Tensor | None  # bool [decode rows, context]
    prefills: tuple[_Prefill, ...]

    @classmethod
    def of(cls, inputs: StepInputs, block_size: int, window: int | None) -> "PagedRows":
        device = inputs.ids.device
        table = inputs.table.long()
        blocks = table[inputs.row_run, inputs.positions // block_size]
        write_at = blocks * block_size + inputs.positions % block_size
        offsets = torch.arange(block_size, device=device)
        places = (table[:, :, None] * block_size + offsets).flatten(1)  # [runs, context]
        decodes = [i for i, run in enumerate(inputs.runs) if run.rows == 1]
        decode_rows = decode_tokens = decode_hidden = None
        if decodes:
            longest = max(inputs.runs[i].start + 1 for i in decodes)
            index = torch.tensor(decodes, device=device)
            decode_rows = torch.tensor([inputs.runs[i].first for i in decodes], device=device)
            decode_tokens = places[index, :longest]
            positions = inputs.positions[decode_rows]
            decode_hidden = _hidden(positions, longest, window)
        prefills = []
        for i, run in enumerate(inputs.runs):
            if run.rows > 1:
                end = run.start + run.rows
                positions = inputs.positions[run.first : run.first + run.rows]
                prefills.append(
                    _Prefill(run.first, run.rows, places[i, :end], _hidden(positions, end, window))
                )
        return cls(write_at, decode_rows, decode_tokens, decode_hidden, tuple(prefills))

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        form: "ScoreForm | None" = None,
    ) -> torch.Tensor:
        """`[rows, heads * dim]` from `q [rows, heads, dim]` and `[cache tokens, kv heads, dim]`."""
        rows, heads, dim = q.shape
        form = form or ScoreForm(dim**-0.5)
        out = q.new_empty(rows, heads * dim)
        if self.decode_rows is not None:
            assert self.decode_tokens is not None
            assert self.decode_hidden is not None
            # [rows, context, kv heads, dim]; each row is a batch of its own
            k, v = keys[self.decode_tokens], values[self.decode_tokens]
            some = q[self.decode_rows][:, None]
            out[self.decode_rows] = _attend(some, k, v, self.decode_hidden[:, None], form).squeeze(
                1
            )
        for run in self.prefills:
            some = q[None, run.first : run.first + run.count]
            k, v = keys[run.tokens][None], values[run.tokens][None]
            out[run.first : run.first + run.count] = _attend(some, k, v, run.hidden[None], form)[0]
        return out


def _hidden(positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
    keys = torch.arange(context, device=positions.device)
    hidden = keys[None] > positions[:, None]
    if window is not None:
        hidden |= keys[None] <= positions[:, None] - window
    return hidden


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, form: ScoreForm
) -> torch.Tensor:
    """For each of n: `q [rows, heads, dim]`, `k`, `v [context, kv heads, dim]`."""
    n, rows, heads, dim = q.shape
    context, kv_heads = k.shape[1], k.shape[2]
    grouped = q.view(n, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [n, kv, group, rows, dim]
    stacked = grouped.reshape(n * kv_heads, -1, dim)
    kk = k.permute(0, 2, 3, 1).reshape(n * kv_heads, dim, context)
    scores = torch.bmm(stacked, kk).view(n, kv_heads, -1, rows, context).float() * form.scale
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores, -1).to(q.dtype).view(n * kv_heads, -1, context)
    vv = v.permute(0, 2, 1, 3).reshape(n * kv_heads, context, dim)
    mixed = torch.bmm(weights, vv).view(n, kv_heads, -1, rows, dim)
    return mixed.permute(0, 3, 1, 2, 4).reshape(n, rows, heads * dim)
