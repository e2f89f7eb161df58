"""Every other architecture: transformers' own model code, with the cache and the batch ours.

The model is built by transformers from the folder; its attention is replaced, through the
registry of attention functions, by one that writes keys and values into our paged cache and reads
them from there. All rows of a step go through the model as one sequence of one batch; who may see
whom is decided by the attention alone. Models whose attention does not go through the registry, or
that keep other state than keys and values, are refused.
Called on the compute stream only.
"""

import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from nagara.engine.config import ModelConfig
from nagara.engine.errors import UnsupportedError
from nagara.engine.inputs import StepInputs
from nagara.engine.paged import PagedRows, ScoreForm
from nagara.engine.zeroed import lazy_zeros

ATTENTION_NAME = "nagara_paged"

# The step being computed on this thread. Not handed through the model as an argument: some models
# do not hand on what they do not know.
_current = threading.local()

# Models that keep something besides keys and values, by a word in their class name.
STATEFUL = ("Mamba", "Rwkv", "Jamba", "Bamba", "RecurrentGemma", "Falcon_H1", "Zamba")


class AdaptedModel:
    """A causal language model of transformers over the paged cache.

    Raises:
        UnsupportedError: transformers cannot build it, or its attention cannot be replaced.
    """

    kernel = "transformers"
    is_graphable = False  # model code of others may ask the host for values
    is_batch_invariant = False

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self._dtype, self._device = dtype, torch.device(device)
        self._model = _load(folder, dtype).to(self._device)
        self._cache = torch.empty(0)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())

    def make_cache(self, blocks: int, block_size: int) -> None:
        c = self.config
        shape = (c.layers, 2, blocks * block_size, c.kv_heads, c.head_dim)
        self._cache = lazy_zeros(shape, self._dtype, self._device)
        self._block_size = block_size

    def drop_cache(self) -> None:
        self._cache = torch.empty(0)

    def clear_cache(self) -> None:
        self._cache.zero_()

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        step = _current.step = _Attention(inputs, self._cache, self._block_size)
        try:
            with torch.inference_mode():
                out = self._model(
                    input_ids=inputs.ids[None],
                    position_ids=inputs.positions[None],
                    use_cache=False,
                    logits_to_keep=inputs.sample_rows,
                )
        finally:
            del _current.step  # it holds the cache
        if len(step.layers_seen) != self.config.layers:
            raise UnsupportedError(
                f"{type(self._model).__name__} does not attend through the registry",
                where="kernel",
            )
        logits: torch.Tensor = out.logits[0].float()
        return logits


class _Attention:
    """The attention of one step over the paged cache."""

    def __init__(self, inputs: StepInputs, cache: torch.Tensor, block_size: int) -> None:
        self._inputs, self._cache, self._block_size = inputs, cache, block_size
        self._rows: dict[int | None, PagedRows] = {}  # by sliding window
        self.layers_seen: set[int] = set()

    def __call__(
        self,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        window: int | None,
        form: ScoreForm,
    ) -> torch.Tensor:
        """`[1, rows, heads, dim]` from three of `[1, heads, rows, dim]`."""
        self.layers_seen.add(layer)
        if window not in self._rows:
            self._rows[window] = PagedRows.of(self._inputs, self._block_size, window)
        rows, (keys, values) = self._rows[window], self._cache[layer]
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv)
        keys.index_copy_(0, rows.write_at, k)
        values.index_copy_(0, rows.write_at, v)
        return rows.attend(q, keys, values, form).view(1, *q.shape)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    try:
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise UnsupportedError(
            "this architecture needs transformers", where="kernel", hint="pip install transformers"
        ) from error
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _through_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise UnsupportedError(
                f"transformers cannot load it: {error}", where=str(folder)
            ) from error
    name = type(model).__name__
    if any(word in name for word in STATEFUL):
        raise UnsupportedError(f"{name} keeps more than keys and values", where="config.json")
    return model.eval()


def _through_cache(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls."""
    if kwargs.get("s_aux") is not None:
        raise UnsupportedError("attention with sinks is not supported", where="config.json")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    form = ScoreForm(scale, kwargs.get("softcap"))
    window = kwargs.get("sliding_window")
    return _current.step(module.layer_idx, (query, key, value), window, form), None
