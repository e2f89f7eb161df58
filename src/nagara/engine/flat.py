"""The flat forward pass of the Llama family in torch: rows of many sequences in, logits out.

Covers Llama, Mistral, Qwen2, Qwen3 and Gemma, told apart by `ModelConfig` and by which tensors the
folder holds (a bias is applied where there is one). Called on the compute stream only.
"""

import torch
from torch.nn import functional

from nagara.engine.config import ModelConfig
from nagara.engine.flat_weights import FlatWeights, Layer
from nagara.engine.inputs import StepInputs
from nagara.engine.paged import PagedRows
from nagara.engine.rope import rope_frequencies
from nagara.engine.zeroed import lazy_zeros


class FlatModel:
    """A decoder of the Llama family in torch operations; works on every device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: FlatWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_compiled: bool = False,
    ) -> None:
        self.config = config
        self.kernel = "torch-compiled" if is_compiled else "torch"
        self.is_graphable = not is_compiled
        self.is_batch_invariant = False  # products and padded attention vary with their shapes
        self._dtype, self._device = dtype, device
        self._weights = weights
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(device)
        self._scale = torch.tensor(config.embed_scale, dtype=dtype, device=device)
        self._before, self._after = before_attention, after_attention
        if is_compiled:
            # All layers share the two graphs; sizes stay symbolic, and one row is a case of its
            # own. Rounding where eager rounds keeps bfloat16 answers near those of the plain model.
            exact = {"emulate_precision_casts": True}
            self._before, self._after = (
                torch.compile(part, dynamic=True, fullgraph=True, options=exact)
                for part in (before_attention, after_attention)
            )
        self._cache = torch.empty(0)

    def make_cache(self, blocks: int, block_size: int) -> None:
        c = self.config
        # [layer, keys or values, token, kv head, dim]: a block is `block_size` tokens in a row
        shape = (c.layers, 2, blocks * block_size, c.kv_heads, c.head_dim)
        self._cache = lazy_zeros(shape, self._dtype, self._device)
        self._block_size = block_size

    def drop_cache(self) -> None:
        self._cache = torch.empty(0)

    def clear_cache(self) -> None:
        self._cache.zero_()

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        with torch.inference_mode():
            return self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        c, w = self.config, self._weights
        angles = inputs.positions[:, None].float() * self._frequencies
        stretch = c.rope.angle_scale
        cos, sin = angles.cos()[:, None] * stretch, angles.sin()[:, None] * stretch
        pages = PagedRows.of(inputs, self._block_size, c.sliding_window)
        x = functional.embedding(inputs.ids, w.embedding)
        if c.embed_scale != 1.0:
            x = x * self._scale
        for layer, cache in zip(w.layers, self._cache, strict=True):
            q, k, v = self._before(x, cos, sin, layer, c)
            cache[0].index_copy_(0, pages.write_at, k)
            cache[1].index_copy_(0, pages.write_at, v)
            x = self._after(x, pages.attend(q, cache[0], cache[1]), layer, c)
        last = rms_norm(x[inputs.sample_rows], w.norm, c)
        logits: torch.Tensor = functional.linear(last, w.head).float()
        return logits


def before_attention(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: Layer, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, each `[rows, heads, dim]`, of `x [rows, hidden]`."""
    rows, dim = x.shape[0], config.head_dim
    h = rms_norm(x, layer.input_norm, config)
    q = layer.q(h).view(rows, config.heads, dim)
    k = layer.k(h).view(rows, config.kv_heads, dim)
    v = layer.v(h).view(rows, config.kv_heads, dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config), rms_norm(k, layer.k_norm, config)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(
    x: torch.Tensor, mixed: torch.Tensor, layer: Layer, config: ModelConfig
) -> torch.Tensor:
    """The rest of a layer: attention's output projection and the gated MLP."""
    x = x + layer.o(mixed)
    h = rms_norm(x, layer.mlp_norm, config)
    gate = layer.gate(h)
    if config.activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh")
    return x + layer.down(gate * layer.up(h))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.norm_eps)
    if config.norm_offset:
        return (wide * (config.norm_offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x [rows, heads, dim]`, halves paired as in the published weights."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
