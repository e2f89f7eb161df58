"""The tensors of a Llama-family model by their role, taken out of a folder by their names."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional

from nagara.engine.config import ModelConfig
from nagara.engine.weights import TensorSource


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer's weight `[out, in]` and, where the family has one, its bias `[out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    packed: torch.Tensor | None = None  # the weight in the order that oneDNN multiplies best

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return functional.linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out

    def pack(self) -> "Projection":
        """The same with a packed copy, which lies in memory of its own."""
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)
        return Projection(self.weight, self.bias, packed)


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


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """Everything a forward pass reads."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied

    def to(self, device: torch.device) -> "FlatWeights":
        """A copy on another device; tied tensors stay tied."""
        moved: dict[int, torch.Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in moved:
                    moved[id(value)] = value.to(device)
                return moved[id(value)]
            if isinstance(value, tuple):
                return tuple(move(item) for item in value)
            if isinstance(value, Projection | Layer | FlatWeights):
                return type(value)(*(move(getattr(value, f.name)) for f in fields(value)))
            return value

        out = move(self)
        assert isinstance(out, FlatWeights)
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor and this build of torch multiply packed weights of the type."""
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weights(weights: FlatWeights) -> tuple[FlatWeights, int]:
    """Packed copies of all layers' products, and how many bytes these take."""
    size = 0

    def packed(layer: Layer) -> Layer:
        nonlocal size
        changes = {}
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            projection = getattr(layer, name).pack()
            size += projection.weight.nbytes
            changes[name] = projection
        return replace(layer, **changes)

    return replace(weights, layers=tuple(packed(layer) for layer in weights.layers)), size


def take_flat_weights(config: ModelConfig, weights: TensorSource) -> FlatWeights:
    """Raises ModelFolderError: a tensor is missing or has another shape than the configuration."""
    prefix = "model." if "model.embed_tokens.weight" in weights else ""
    table = (config.vocab, config.hidden)
    embedding = weights.take(f"{prefix}embed_tokens.weight", table)
    tied = config.tied_head or "lm_head.weight" not in weights
    return FlatWeights(
        embedding=embedding,
        layers=tuple(
            _take_layer(config, weights, f"{prefix}layers.{i}.") for i in range(config.layers)
        ),
        norm=weights.take(f"{prefix}norm.weight", (config.hidden,)),
        head=embedding if tied else weights.take("lm_head.weight", table),
    )


def _take_layer(config: ModelConfig, weights: TensorSource, prefix: str) -> Layer:
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
