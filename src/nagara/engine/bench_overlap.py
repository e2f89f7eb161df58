"""Measures what a step in flight gains: the same work at depth 0 and depth 1, in real time.

On the simulated device a step takes a given time and all host work is real. On the CPU and on CUDA
a random model of SmolLM2's shape computes. *Busy* lies between the device's own marks.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nagara.engine.bench_engine import Clocked, make_prompts
from nagara.engine.engine import Engine
from nagara.engine.request import SamplingParams
from nagara.engine.settings import EngineSettings
from nagara.engine.simulated import run_overlap

Note = Callable[[str], None]

# SmolLM2-135M's shape with a small vocabulary.
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def run(device: str, step_ms: float, batch: int, tokens: int, note: Note) -> dict[str, Any]:
    """Both depths and whether their tokens are equal.

    Raises:
        EngineError: the device cannot be used.
    """
    if device == "sim":
        note(f"simulated device: {step_ms} ms a step, batch {batch}, {tokens} tokens each")
        return _simulated(step_ms, batch, tokens, note) | {
            "cpu": _computed("cpu", min(batch, 32), min(tokens, 32), note)
        }
    return _computed(device, batch, tokens, note)


def _simulated(step_ms: float, batch: int, tokens: int, note: Note) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the stand-in's tiny operations are not worth a second thread
    gc.collect()
    gc.freeze()
    try:
        runs = []
        for depth in (0, 1):
            runs.append(run_overlap(depth, lambda _: step_ms / 1e3, batch, tokens))
            note(f"depth {depth}: {runs[-1].wall_s:.1f} s, busy {runs[-1].device_busy:.4f}")
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
    return {
        "device": "simulated",
        "tokens_equal": runs[0].tokens == runs[1].tokens,
        "depth0": runs[0].fields(),
        "depth1": runs[1].fields(),
    }


def _computed(device: str, batch: int, tokens: int, note: Note) -> dict[str, Any]:
    """A random model, made in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_model(folder)
        results, texts = {}, []
        for depth in (0, 1):
            settings = EngineSettings(
                dtype="bfloat16", device=device, depth=depth, max_concurrency=batch
            )
            fields, made = _measure(folder, settings, batch, tokens)
            note(f"{device} depth {depth}: {fields['wall_s']:.1f} s")
            results[f"depth{depth}"] = fields
            texts.append(made)
    return {"device": device, "tokens_equal": texts[0] == texts[1], **results}


def _measure(
    folder: Path, settings: EngineSettings, batch: int, tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    engine = Engine(folder, settings)
    engine.start()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = (make_prompts(engine.config.vocab) * (batch // 32 + 1))[:batch]
    try:
        for is_warm in (False, True):
            before = engine.stats()
            started = time.perf_counter()
            work = params if is_warm else replace(params, max_tokens=2)
            sent = [Clocked() for _ in prompts]
            for prompt, clocked in zip(prompts, sent, strict=True):
                engine.submit(prompt, work, clocked.receive)
            for clocked in sent:
                clocked.wait()
            wall_s = time.perf_counter() - started
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "wall_s": wall_s,
        "device_busy": stats.device_busy,
        "host_ms_per_step": stats.host_ms_per_step,
        "host_hidden_ms_per_step": stats.host_hidden_ms_per_step,
        "steps": stats.steps - before.steps,
        "kernel": stats.kernel,
    }, [clocked.tokens for clocked in sent]


def write_random_model(folder: Path) -> None:
    """A folder with random weights, and a tokenizer that spells bytes."""
    import tokenizers
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    heads, kv = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv * dim, hidden),
        "self_attn.v_proj": (kv * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = {
        "model.embed_tokens.weight": (SHAPE["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        names |= {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
        names |= {f"{prefix}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    tensors = {
        name: torch.ones(shape).bfloat16()
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.05).bfloat16()
        for name, shape in names.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    spelled = {token: i for i, token in enumerate(sorted(alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(spelled, []))
    tokenizer.save(str(folder / "tokenizer.json"))
