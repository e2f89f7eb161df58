"""A random model of an 8B shape on a CUDA device: what does a step in flight gain?

    python bench/gpu.py                   8192 new tokens for each of 32 requests
    python bench/gpu.py --short           256 new tokens: fits a few minutes
    python bench/gpu.py --no-graphs       launches each operation of a step by itself
    python bench/gpu.py --device cpu --shape tiny --new 32      tries the script without a GPU

Needs torch, transformers, safetensors, tokenizers and numpy, and `src/` beside this folder. The
weights are random and made on the device, so nothing is downloaded. Prints a table on standard
error and one JSON object on standard output.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch

from nagara.engine.config import ModelConfig
from nagara.engine.flat import FlatModel
from nagara.engine.flat_weights import FlatWeights, Layer, Projection
from nagara.engine.graphs import CudaGraphs, GraphMaker, RecordedGraphs
from nagara.engine.request import SamplingParams
from nagara.engine.rope_config import RopeConfig
from nagara.engine.simulated import build_core, make_sequence
from nagara.engine.streams import cuda_device, worker_device

SHAPES = {
    "8b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 14336,
        "vocab": 128256,
    },
    "1b": {
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "intermediate": 8192,
        "vocab": 128256,
    },
    "tiny": {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
        "vocab": 512,
    },
}


def make_config(shape: str, context: int) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        context=context,
        norm_eps=1e-5,
        rope=RopeConfig(500000.0),
        tied_head=False,
        dtype="bfloat16",
        **SHAPES[shape],
    )


def make_weights(c: ModelConfig, device: torch.device) -> FlatWeights:
    """Random weights; small enough that activations keep their size over all layers."""
    generator = torch.Generator(device=device).manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        made = torch.randn(outputs, inputs, generator=generator, device=device)
        return (made * inputs**-0.5).bfloat16()

    def projection(outputs: int, inputs: int) -> Projection:
        return Projection(matrix(outputs, inputs), None)

    def ones() -> torch.Tensor:
        return torch.ones(c.hidden, dtype=torch.bfloat16, device=device)

    layers = tuple(
        Layer(
            input_norm=ones(),
            q=projection(c.heads * c.head_dim, c.hidden),
            k=projection(c.kv_heads * c.head_dim, c.hidden),
            v=projection(c.kv_heads * c.head_dim, c.hidden),
            o=projection(c.hidden, c.heads * c.head_dim),
            q_norm=None,
            k_norm=None,
            mlp_norm=ones(),
            gate=projection(c.intermediate, c.hidden),
            up=projection(c.intermediate, c.hidden),
            down=projection(c.hidden, c.intermediate),
        )
        for _ in range(c.layers)
    )
    return FlatWeights(matrix(c.vocab, c.hidden), layers, ones(), matrix(c.vocab, c.hidden))


def make_graphs(args: argparse.Namespace) -> GraphMaker | None:
    if args.no_graphs:
        return None
    return CudaGraphs() if args.device == "cuda" else RecordedGraphs()


def run(model: FlatModel, args: argparse.Namespace, depth: int, new: int) -> dict[str, Any]:
    """Generate at one depth; `tokens` are kept for the comparison."""
    device = cuda_device() if args.device == "cuda" else worker_device()
    context = args.prompt + new + 16
    blocks = args.batch * -(-context // 16)
    core = build_core(
        model,
        device,
        depth,
        slots=args.batch,
        blocks=blocks,
        context=context,
        chunk_rows=512,
        graphs=make_graphs(args),
        is_caching=False,
    )
    draw = random.Random(0)
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    sequences = [
        make_sequence(i, [draw.randrange(model.config.vocab) for _ in range(args.prompt)], params)
        for i in range(args.batch)
    ]
    for sequence in sequences:
        core.scheduler.add(sequence)
    core.capture(args.batch)
    earlier_s = device.compute.busy_s()
    started = time.perf_counter()
    while core.has_work:
        core.step()
    wall_s = time.perf_counter() - started
    device.close()
    busy_s = device.compute.busy_s() - earlier_s
    times, graphs = core.times, core.graphs
    model.drop_cache()
    hidden_s = max(0.0, times.host_s - max(0.0, wall_s - busy_s))
    return {
        "tokens": [sequence.outputs for sequence in sequences],
        "wall_s": wall_s,
        "device_busy": busy_s / wall_s,
        "host_ms_per_step": times.host_s / times.steps * 1e3,
        "host_hidden_ms_per_step": hidden_s / times.steps * 1e3,
        "steps": times.steps,
        "graphs": 0 if graphs is None else len(graphs),
        "replayed_steps": 0 if graphs is None else graphs.replayed,
        "tok_s": args.batch * new / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=8192)
    parser.add_argument("--short", action="store_true", help="256 new tokens")
    parser.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    args = parser.parse_args()
    new = 256 if args.short else args.new
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is usable; try --device cpu --shape tiny --new 32")
    device = torch.device(args.device)
    config = make_config(args.shape, args.prompt + new + 16)
    model = FlatModel(config, make_weights(config, device), torch.bfloat16, device)
    run(model, args, 0, 8)  # libraries load and kernels are chosen at the first use
    results = {f"depth{depth}": run(model, args, depth, new) for depth in (0, 1)}
    tokens = [result.pop("tokens") for result in results.values()]
    is_equal = tokens[0] == tokens[1]
    note(f"{'':8}{'wall s':>10}{'busy':>9}{'host ms':>10}{'hidden':>9}{'tok/s':>10}")
    for name, r in results.items():
        note(
            f"{name:8}{r['wall_s']:10.2f}{r['device_busy']:9.4f}{r['host_ms_per_step']:10.3f}"
            f"{r['host_hidden_ms_per_step']:9.3f}{r['tok_s']:10.0f}"
        )
    note(f"tokens equal: {is_equal}")
    facts = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": args.shape,
        "batch": args.batch,
        "new_tokens": new,
        "tokens_equal": is_equal,
    }
    sys.stdout.write(json.dumps({**facts, **results}) + "\n")


def note(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
