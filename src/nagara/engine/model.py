"""What the engine needs of a model: one small protocol, and the choice of who fulfils it."""

from typing import Protocol

import torch

from nagara.engine.config import ModelConfig
from nagara.engine.inputs import StepInputs


class StepModel(Protocol):
    """A decoder that computes the rows of many sequences at once over a paged cache.

    `kernel` names what computes: `c`, `torch`, `torch-compiled` or `transformers`. `is_graphable`
    says that a forward pass asks the host for nothing but its inputs' shapes, so that it can be
    captured as a graph; `is_batch_invariant` that a row's result is the same to the last bit
    whatever rows are computed beside it.
    """

    kernel: str
    is_graphable: bool
    is_batch_invariant: bool
    config: ModelConfig

    def make_cache(self, blocks: int, block_size: int) -> None:
        """Room for `blocks` blocks of keys and values; pages are touched only when used."""

    def drop_cache(self) -> None: ...

    def clear_cache(self) -> None:
        """Zeros where the cache is: its memory has come back with anything in it."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Write the rows' keys and values; logits `[samples, vocab]` float32 of the sample rows.

        The result is valid until the next call.
        """
