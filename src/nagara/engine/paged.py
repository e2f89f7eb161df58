"""Attention of a step's rows over the paged cache, in torch operations.

The runs of one row at the step's beginning (decode) go together, padded to the longest context
among them; all others (prefill) go one by one. On this path the last bits of a row may depend on
how long its batch mates are.
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
    decodes: int  # the first rows are runs of one row each
    decode_tokens: torch.Tensor  # [decodes, context]: where their tokens lie
    decode_hidden: torch.Tensor  # bool [decodes, context]: True where a row may not look
    prefills: tuple[_Prefill, ...]

    @classmethod
    def of(cls, inputs: StepInputs, block_size: int, window: int | None) -> "PagedRows":
        """Only slices and device operations: a copy from the host would wait for the device."""
        device = inputs.ids.device
        table, positions = inputs.table.long(), inputs.positions
        blocks = table[inputs.row_run, positions // block_size]
        write_at = blocks * block_size + positions % block_size
        offsets = torch.arange(block_size, device=device)
        places = (table[:, :, None] * block_size + offsets).flatten(1)  # [runs, context]
        decodes = longest = 0
        while decodes < len(inputs.runs) and inputs.runs[decodes].rows == 1:
            longest = max(longest, inputs.runs[decodes].start + 1)
            decodes += 1
        prefills = []
        for i, run in enumerate(inputs.runs[decodes:], decodes):
            end = run.start + run.rows
            hidden = _hidden(positions[run.first : run.first + run.rows], end, window)
            prefills.append(_Prefill(run.first, run.rows, places[i, :end], hidden))
        return cls(
            write_at,
            decodes,
            places[:decodes, :longest],
            _hidden(positions[:decodes], longest, window),
            tuple(prefills),
        )

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
        if self.decodes:
            # [rows, context, kv heads, dim]; each row is a batch of its own
            k, v = keys[self.decode_tokens], values[self.decode_tokens]
            hidden = self.decode_hidden[:, None]
            out[: self.decodes] = _attend(q[: self.decodes, None], k, v, hidden, form)[:, 0]
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
