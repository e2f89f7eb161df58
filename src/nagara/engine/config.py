"""What a model is: its shape and the switches that tell one decoder family from another.

Knows the keys of `config.json`, in the spelling of transformers 4 and 5. Imports no torch and
does no I/O.
"""

from dataclasses import dataclass
from typing import Any

from nagara.engine.errors import UnsupportedError
from nagara.engine.rope_config import RopeConfig, parse_rope, refuse_moving_rope

# The families whose forward pass is our own.
FLAT_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder model and the small ways in which families differ."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int  # positions it was made for
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    dtype: str  # of the stored weights, as config.json names it
    activation: str = "silu"  # silu or gelu_tanh
    norm_offset: float = 0.0  # Gemma multiplies by (1 + weight)
    embed_scale: float = 1.0
    qk_norm: bool = False  # Qwen3 normalises each head of q and k
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def context_weight(self) -> float:
        """The work of a row's looking at one token of its context, as a share of its products.

        Multiplications of attention over those of the linear layers, the former counted thrice:
        they come in small pieces and take about three times as long each on a CPU.
        """
        attention = 2 * self.heads * self.head_dim
        mixing = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return 3 * attention / (mixing + 3 * self.intermediate * self.hidden)


def parse_model_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Read a `config.json` and, for the end tokens, a `generation_config.json`.

    Raises:
        UnsupportedError: a family or a feature that the flat forward does not compute.
    """
    model_type = str(raw.get("model_type", ""))
    if model_type not in FLAT_MODEL_TYPES:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported",
            where="config.json",
            hint="supported: " + ", ".join(FLAT_MODEL_TYPES),
        )
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        config = ModelConfig(
            model_type=model_type,
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            intermediate=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            context=int(raw.get("max_position_embeddings") or 2048),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=parse_rope(raw),
            tied_head=bool(raw.get("tie_word_embeddings", model_type == "gemma")),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            activation=_activation(raw),
            norm_offset=1.0 if model_type == "gemma" else 0.0,
            embed_scale=hidden**0.5 if model_type == "gemma" else 1.0,
            qk_norm=model_type == "qwen3",
            sliding_window=_sliding_window(raw, model_type),
            eos_ids=_eos_ids(raw, generation or {}),
            bos_id=raw.get("bos_token_id"),
        )
    except KeyError as error:
        raise UnsupportedError(f"lacks the key {error}", where="config.json") from error
    return config


def parse_general_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Read the sizes out of any decoder's `config.json`, for models that others compute.

    Raises:
        UnsupportedError: a size is missing: the model is no plain decoder.
    """

    def size(*names: str) -> int:
        for name in names:
            if raw.get(name):
                return int(raw[name])
        raise UnsupportedError(
            f"has none of {', '.join(names)}: no plain decoder", where="config.json"
        )

    refuse_moving_rope(raw)
    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    return ModelConfig(
        model_type=str(raw.get("model_type", "")),
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        intermediate=int(raw.get("intermediate_size") or raw.get("n_inner") or 4 * hidden),
        vocab=size("vocab_size"),
        context=int(raw.get("max_position_embeddings") or raw.get("n_positions") or 2048),
        norm_eps=0.0,
        rope=RopeConfig(10000.0),
        tied_head=False,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=_eos_ids(raw, generation or {}),
        bos_id=raw.get("bos_token_id"),
    )


def _activation(raw: dict[str, Any]) -> str:
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if raw.get("model_type") == "gemma" and name == "gelu":
        return "gelu_tanh"  # early Gemma folders name the function wrongly
    if name not in known:
        raise UnsupportedError(f"activation {name!r} is not supported", where="config.json")
    return known[name]


def _sliding_window(raw: dict[str, Any], model_type: str) -> int | None:
    window = raw.get("sliding_window")
    if model_type in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        return None
    if window is None or window >= int(raw.get("max_position_embeddings") or 2048):
        return None
    if model_type in ("qwen2", "qwen3"):
        raise UnsupportedError("a sliding window on some layers only", where="config.json")
    return int(window)


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
