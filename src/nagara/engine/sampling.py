"""From a row of logits to a token, and to log probabilities.

A draw depends on (seed, position) alone: the uniform number comes from a hash of the two, and the
token from the inverse of the row's cumulative distribution. So the same request gets the same
tokens whatever else runs beside it. Called by the step thread only.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from nagara.engine.request import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): the SplitMix64 finaliser over their mixture."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
) -> torch.Tensor:
    """Logits `[vocab]` after penalties, bias and the ban on ending too early."""
    has_penalty = (
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )
    is_early = len(output) < params.min_tokens and end_ids
    if not (has_penalty or is_early or params.logit_bias):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}))
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        ids = torch.tensor(list(counts))
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias:
        logits[token] += bias
    if is_early:
        logits[torch.tensor(list(end_ids))] = float("-inf")
    return logits


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position`: the likeliest, or one drawn from what the filters leave."""
    if params.is_greedy:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    ordered, ids = scaled.sort(descending=True, stable=True)
    probabilities = torch.softmax(ordered, 0)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_k:
        kept[params.top_k :] = False
    if params.top_p < 1:
        kept &= probabilities.cumsum(0) - probabilities < params.top_p
    if params.min_p:
        kept &= probabilities >= params.min_p * probabilities[0]
    mass = (probabilities * kept).cumsum(0)
    target = uniform(seed, position) * float(mass[-1])
    index = int(torch.searchsorted(mass, target, right=True))
    return int(ids[min(index, int(kept.sum()) - 1)])


def logprob_of(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Log probability of `token` before temperature and filters, and the best alternatives."""
    values = torch.log_softmax(logits, 0)
    best = values.topk(alternatives)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(values[token]), top)
