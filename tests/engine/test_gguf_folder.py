"""A tiny GGUF of known weights becomes a folder that transformers reads back to the same model."""

import json
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="needs gguf")
torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from nagara.engine.errors import UnsupportedError  # noqa: E402
from nagara.engine.gguf_folder import convert  # noqa: E402
from nagara.engine.modelfolder import check_model_folder  # noqa: E402

HEADS, KV_HEADS, HIDDEN, WIDE, LAYERS = 4, 2, 32, 64, 2
# The bytes a byte-level vocabulary needs at least, then one merged token, then the control ones.
TOKENS = ["<end>", "<start>", "a", "b", "1", "2", "Ġ", "ab", "Ġ1"]
MERGES = ["a b", "Ġ 1"]
TEMPLATE = "{% for m in messages %}<start>{{ m.content }}<end>{% endfor %}"


def paired(weight: Any, heads: int) -> Any:
    """From this layout's row order (halves) to GGUF's (neighbours): the way a GGUF is made."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=True,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.to(torch.bfloat16))  # exact in bfloat16: nothing may change
    return made


def write_gguf(file: Path, model: Any, **changed: Any) -> Path:
    writer = gguf.GGUFWriter(file, changed.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if "scaling" in changed:
        writer.add_rope_scaling_type(changed["scaling"])
    state = model.state_dict()
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(LAYERS):
        for short, long in names.items():
            weight = state[f"model.layers.{layer}.{long}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = paired(weight, HEADS if short == "attn_q" else KV_HEADS)
            writer.add_tensor(f"blk.{layer}.{short}.weight", weight.contiguous().numpy())
    if "extra" in changed:
        writer.add_tensor(changed["extra"], state["model.norm.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("converted")
    convert(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model), made)
    return made


def test_the_converted_model_computes_what_the_original_does(model: Any, folder: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert set(loaded.state_dict()) == set(model.state_dict())
    ids = torch.tensor([[1, 2, 3, 7, 8, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_weights_are_bfloat16_and_the_folder_is_a_good_one(folder: Path) -> None:
    checked = check_model_folder(folder)
    assert {place.dtype for place in checked.tensors.values()} == {"BF16"}
    assert checked.config["tie_word_embeddings"] is True
    assert checked.config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in checked.config


def test_the_tokenizer_splits_digits_and_knows_its_control_tokens(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("ab 12<end>") == [7, 6, 4, 5, 0]
    assert tokenizer.decode([7, 6, 4, 5]) == "ab 12"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<start>", "<end>")
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<start>ab<end>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


def test_other_vocabularies_keep_digits_and_blanks_together(model: Any, tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "tiny.gguf", model, pre="gpt-2"), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ab 1") == [7, 8]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architecture": "mamba"}, "mamba"),
        ({"pre": "qwen2"}, "qwen2"),
        ({"extra": "blk.0.attn_q.bias"}, r"blk\.0\.attn_q\.bias"),
        ({"extra": "rope_freqs.weight"}, r"rope_freqs\.weight"),
        ({"scaling": gguf.RopeScalingType.YARN}, r"rope\.scaling"),
    ],
)
def test_what_cannot_be_converted_is_named(
    model: Any, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        convert(write_gguf(tmp_path / "tiny.gguf", model, **changed), tmp_path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(UnsupportedError, match=r"not\.gguf"):
        convert(tmp_path / "not.gguf", tmp_path)
