"""The flat forward pass of the Llama family in plain torch: rows of one sequence in, logits out.

Covers Llama, Mistral, Qwen2, Qwen3 and Gemma, told apart by `ModelConfig` and by which tensors the
folder holds (a bias is applied where there is one). Called by the step thread only.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from nagara.engine.config import ModelConfig, RopeConfig
from nagara.engine.weights import MappedWeights


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer's weight `[out, in]` and, where the family has one, its bias `[out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one decoder layer."""

    input_norm: torch.Tensor
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: Projection
    up: Projection
    down: Projection


class FlatModel:
    """A decoder whose forward pass takes the rows of one sequence and its cache."""

    def __init__(self, config: ModelConfig, weights: MappedWeights, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        prefix = "model." if "model.embed_tokens.weight" in weights else ""
        table = (config.vocab, config.hidden)
        self._embedding = weights.take(f"{prefix}embed_tokens.weight", table)
        self._layers = [
            _take_layer(config, weights, f"{prefix}layers.{i}.") for i in range(config.layers)
        ]
        self._norm = weights.take(f"{prefix}norm.weight", (config.hidden,))
        tied = config.tied_head or "lm_head.weight" not in weights
        self._head = self._embedding if tied else weights.take("lm_head.weight", table)
        self._frequencies = rope_frequencies(config.rope, config.head_dim)
        self._layer_step = layer_step

    def compile(self) -> None:
        """Compile one decoder layer, which all layers share; sizes stay symbolic.

        Two graphs come of it: one row (decode) and several rows (prefill).
        """
        # Rounding where eager rounds keeps bfloat16 answers near those of the plain engine
        exact = {"emulate_precision_casts": True}
        self._layer_step = torch.compile(layer_step, dynamic=True, fullgraph=True, options=exact)

    def new_cache(self, tokens: int) -> torch.Tensor:
        """Room for the keys and values of one sequence: `[layer, k or v, kv head, token, dim]`."""
        c = self.config
        return torch.empty(c.layers, 2, c.kv_heads, tokens, c.head_dim, dtype=self.dtype)

    def forward(self, ids: torch.Tensor, start: int, cache: torch.Tensor) -> torch.Tensor:
        """Compute rows `ids` at positions `start...` and return the last row's logits `[vocab]`."""
        with torch.inference_mode():
            return self._forward(ids, start, cache)

    def _forward(self, ids: torch.Tensor, start: int, cache: torch.Tensor) -> torch.Tensor:
        rows = ids.shape[0]
        end = start + rows
        positions = torch.arange(start, end)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        x = functional.embedding(ids, self._embedding)
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(self.config.embed_scale, dtype=self.dtype)
        mask = causal_mask(positions, end, self.config.sliding_window)
        for layer, kv in zip(self._layers, cache, strict=True):
            kv_seen = kv[:, :, :end]
            x = self._layer_step(x, cos, sin, mask, kv_seen, layer, self.config)
        last = rms_norm(x[-1:], self._norm, self.config)
        logits: torch.Tensor = functional.linear(last, self._head)[0].float()
        return logits


def layer_step(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor,
    kv: torch.Tensor,
    layer: Layer,
    config: ModelConfig,
) -> torch.Tensor:
    """One decoder layer over `x [rows, hidden]`; writes the rows' keys and values into `kv`.

    `kv [2, kv heads, tokens, dim]` ends with the rows' own tokens.
    """
    rows = x.shape[0]
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    h = rms_norm(x, layer.input_norm, config)
    q = layer.q(h).view(rows, heads, dim)
    k = layer.k(h).view(rows, kv_heads, dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config), rms_norm(k, layer.k_norm, config)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    v = layer.v(h).view(rows, kv_heads, dim)
    tokens = kv.shape[2]
    kv[0, :, tokens - rows :] = k.transpose(0, 1)
    kv[1, :, tokens - rows :] = v.transpose(0, 1)
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped.reshape(kv_heads, -1, dim) @ kv[0].transpose(1, 2)
    scores = scores.view(kv_heads, -1, rows, tokens).float() * dim**-0.5 + mask
    weights = torch.softmax(scores, -1).to(x.dtype)
    mixed = weights.view(kv_heads, -1, tokens) @ kv[1]
    mixed = mixed.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)
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
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def causal_mask(positions: torch.Tensor, end: int, window: int | None) -> torch.Tensor:
    """`[rows, end]`: 0 where a row may look, minus infinity elsewhere."""
    keys = torch.arange(end)
    hidden = keys[None] > positions[:, None]
    if window is not None:
        hidden |= keys[None] <= positions[:, None] - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


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
    return frequencies


def _take_layer(config: ModelConfig, weights: MappedWeights, prefix: str) -> Layer:
    hidden, dim = config.hidden, config.head_dim

    def projection(name: str, outputs: int, inputs: int) -> Projection:
        bias = f"{prefix}{name}.bias"
        return Projection(
            weights.take(f"{prefix}{name}.weight", (outputs, inputs)),
            weights.take(bias, (outputs,)) if bias in weights else None,
        )

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", (size,))

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        q=projection("self_attn.q_proj", config.heads * dim, hidden),
        k=projection("self_attn.k_proj", config.kv_heads * dim, hidden),
        v=projection("self_attn.v_proj", config.kv_heads * dim, hidden),
        o=projection("self_attn.o_proj", hidden, config.heads * dim),
        q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate=projection("mlp.gate_proj", config.intermediate, hidden),
        up=projection("mlp.up_proj", config.intermediate, hidden),
        down=projection("mlp.down_proj", hidden, config.intermediate),
    )
