"""Angles of rotary position embedding, stretched beyond the trained length in published ways."""

import math

import torch

from nagara.engine.rope_config import RopeConfig


def rope_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Angle per position for each pair of dimensions, `[dim / 2]`, stretched as configured."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1).
        turns = rope.original_context * frequencies / (2 * torch.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        blend = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / rope.factor)
    if rope.kind == "yarn":
        slowed = _yarn_ramp(rope, dim)
        return frequencies * (1 - slowed + slowed / rope.factor)
    return frequencies


def _yarn_ramp(rope: RopeConfig, dim: int) -> torch.Tensor:
    """How much each pair is slowed: not at all if it turns `fast_turns` times within the trained
    length, wholly if it turns `slow_turns` times, evenly in between (YaRN, arXiv 2309.00071)."""

    def pair_of(turns: float) -> float:
        return (
            dim
            * math.log(rope.original_context / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = pair_of(rope.fast_turns), pair_of(rope.slow_turns)
    if rope.has_whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return ((torch.arange(dim // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
