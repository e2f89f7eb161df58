"""Makes a model folder out of a GGUF file: `python -m nagara.engine.gguf_folder FILE FOLDER`.

It knows the GGUF names of the Llama layout (RMS norm, rotary positions, gated MLP, no biases)
with a byte-level BPE tokenizer, and writes what the Hugging Face layout calls `config.json`,
`model.safetensors` (bfloat16), `tokenizer.json`, `tokenizer_config.json` and
`generation_config.json`. Anything else in a file is refused by name. Run as a process of its own:
it loads torch and holds the whole model in memory.

Formats: GGUF, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the files written,
https://huggingface.co/docs/transformers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from nagara.engine.errors import EngineError, UnsupportedError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HEAD_DIM = "llama.attention.key_length"  # only where it is not hidden size / heads
_CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type


class _Fields:
    """The metadata of one GGUF file, read by key."""

    def __init__(self, reader: gguf.GGUFReader, file: Path) -> None:
        self._fields = reader.fields
        self._file = file

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise UnsupportedError(f"has no metadata {key!r}", where=str(self._file))
        return self._fields[key].contents()

    def expect(self, key: str, *known: str) -> None:
        """Raises `UnsupportedError` unless the value is one of those this module can convert."""
        if self[key] not in known:
            raise UnsupportedError(
                f"{key} is {self[key]!r}; only {', '.join(known)} can be converted",
                where=str(self._file),
            )


def convert(file: Path, folder: Path) -> None:
    """Writes the model folder's files into `folder`, which exists.

    Raises:
        UnsupportedError: the file is not GGUF, or holds a layout this module does not know.
    """
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"cannot be read as GGUF: {error}", where=str(file)) from error
    fields = _Fields(reader, file)
    fields.expect("general.architecture", "llama")
    fields.expect("tokenizer.ggml.model", "gpt2")
    fields.expect("tokenizer.ggml.pre", "smollm", "gpt-2")
    for key in reader.fields:
        if key.startswith("llama.rope.scaling."):
            raise UnsupportedError(f"{key} cannot be converted", where=str(file))
    heads = int(fields["llama.attention.head_count"])
    kv_heads = int(fields["llama.attention.head_count_kv"])
    tensors = dict(_tensors(reader, file, heads, kv_heads))
    config = _config(fields, is_tied="lm_head.weight" not in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", _token_ids(fields)),
        ("tokenizer_config.json", _tokenizer_config(fields)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _tensors(
    reader: gguf.GGUFReader, file: Path, heads: int, kv_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor under its new name, dequantized, rounded to bfloat16."""
    for tensor in reader.tensors:
        name = _new_name(tensor.name, file)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            values = _halves_apart(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _halves_apart(values, kv_heads)
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _new_name(name: str, file: Path) -> str:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    kind, _, suffix = part.partition(".")
    if prefix != "blk" or suffix != "weight" or kind not in _LAYER_TENSORS:
        raise UnsupportedError(f"holds the tensor {name!r}, which is not known", where=str(file))
    return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"


def _halves_apart(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorders a projection's rows within each head.

    GGUF's Llama rotates neighbours (rows 0 and 1 of a head are a pair), this layout rotates
    halves (rows 0 and d/2): rows (pair, which) become (which, pair).
    """
    rows, columns = values.shape
    by_pair = values.reshape(heads, rows // heads // 2, 2, columns)
    return by_pair.swapaxes(1, 2).reshape(rows, columns)


def _config(fields: _Fields, *, is_tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    rope_theta = _short_float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": int(fields[_HEAD_DIM]) if _HEAD_DIM in fields else hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "rms_norm_eps": _short_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,  # the name of versions before rope_parameters
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_token_ids(fields),
    }


def _short_float(value: float) -> float:
    """GGUF keeps these as float32: 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _token_ids(fields: _Fields) -> dict[str, Any]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def _tokenizer(fields: _Fields) -> tokenizers.Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if fields["tokenizer.ggml.pre"] == "smollm":
        # Each digit stands alone, also apart from the blank before it.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(fields: _Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role, key in (
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ):
        if key in fields:
            config[role] = tokens[int(fields[key])]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except EngineError as error:
        sys.exit(f"error: {error}")
