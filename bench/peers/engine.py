"""The same prompts through nagara's engine and its peers on a CPU, in turn, with ratios.

    python bench/peers/engine.py --model FOLDER [--runs 3] [--tokens 128] [--json]
    python bench/peers/engine.py --model FOLDER --small     a smaller work, for a busy machine

Peers: transformers' `generate` with padding (padded), its `generate_batch` (batched), and vllm's
build for CPUs (vllm), all in bfloat16. Each run is a process of its own: it loads the model, does
the work once to warm up, and once more with the clock on. All take part in every round, nagara at
its beginning and at its end, so that what else the machine does falls on all alike; a round's
ratios are formed with the mean of nagara's two. vllm's environment is made by
`scripts/environments.py` at the first use (3 GB). Greedy and without stopping early: everybody
makes the same number of tokens, which is checked.

Prints a table, or with `--json` one JSON object; progress goes to standard error.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPE = "bfloat16"
_RUN_S = 1500.0
_MARK = "speed:"

# Each program has `folder`, `new` (tokens per prompt) and `prompts`, and calls `report` with a
# function that does the work and returns how many tokens were made.
COMMON = """
import json, sys, time
folder, new, is_eager = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "eager"
prompts = json.load(sys.stdin)
def report(run, dtype):
    run()
    started = time.perf_counter()
    made = run()
    elapsed = time.perf_counter() - started
    wanted = len(prompts) * new
    assert made == wanted, f"{made} tokens instead of {wanted}"
    print("\\nspeed:" + json.dumps({"tok_s": made / elapsed, "dtype": str(dtype)}), flush=True)
"""

TRANSFORMERS = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
model.generation_config.eos_token_id = None
"""

PROGRAMS = {
    "nagara": """
from nagara.engine.bench_engine import Clocked
from nagara.engine.engine import Engine
from nagara.engine.request import SamplingParams
from nagara.engine.settings import EngineSettings
engine = Engine(folder, EngineSettings(dtype="bfloat16", max_concurrency=len(prompts),
                                       has_prefix_cache=False))
engine.start()
def run():
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    sent = [Clocked() for _ in prompts]
    for prompt, clocked in zip(prompts, sent):
        engine.submit(prompt, params, clocked.receive)
    for clocked in sent:
        clocked.wait()
    return sum(len(clocked.tokens) for clocked in sent)
report(run, "bfloat16")
engine.close()
""",
    "padded": TRANSFORMERS
    + """
longest = max(map(len, prompts))
ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts])
mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
def run():
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                         do_sample=False, pad_token_id=2)
    return (out.shape[1] - longest) * out.shape[0]
report(run, model.dtype)
""",
    "batched": TRANSFORMERS
    + """
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2)
batching = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=512)
def run():
    outs = model.generate_batch(prompts, generation_config=config,
                                continuous_batching_config=batching, progress_bar=False)
    assert all(not out.error for out in outs.values()), [out.error for out in outs.values()]
    return sum(len(out.generated_tokens) for out in outs.values())
report(run, model.dtype)
""",
    "vllm": """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model = LLM(folder, dtype="bfloat16", max_num_seqs=len(prompts), max_model_len=2048,
                kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
                enforce_eager=is_eager)
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": p} for p in prompts]
    def run():
        outs = model.generate(asked, params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs)
    report(run, model.llm_engine.model_config.dtype)
""",
}


def interpreter(peer: str) -> str:
    """This interpreter, or that of vllm's own environment, which is made at the first use."""
    if peer != "vllm":
        return sys.executable
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/environments.py"), "vllm"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return str(Path(done.stdout.strip()) / "bin/python")


def measure(
    peer: str, folder: Path, prompts: list[list[int]], tokens: int, mode: str
) -> dict[str, Any]:
    """`tok_s` and `dtype` of one run in a process of its own.

    Raises RuntimeError with the end of what it wrote if it fails.
    """
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    began_s = time.perf_counter()
    done = subprocess.run(
        [interpreter(peer), "-c", COMMON + PROGRAMS[peer], str(folder), str(tokens), mode],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        env={**os.environ, **settings},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{peer} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return {**found, "load": os.getloadavg()[0], "whole_s": time.perf_counter() - began_s}


def rounds(
    peers: list[str], folder: Path, prompts: list[list[int]], tokens: int, runs: int, mode: str
) -> list[dict[str, Any]]:
    """One document per round: what each measured, and nagara's second time."""
    found = []
    for number in range(runs):
        measured: dict[str, Any] = {}
        for name in ("nagara", *peers, "nagara again"):
            measured[name] = measure(name.split()[0], folder, prompts, tokens, mode)
            said = f"{measured[name]['tok_s']:.0f} tok/s (load {measured[name]['load']:.1f})"
            sys.stderr.write(f"round {number + 1}/{runs}: {name} {said}\n")
        found.append(measured)
    return found


def figures(peers: list[str], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians with minima and maxima; ratios within a round."""
    own = [(r["nagara"]["tok_s"] + r["nagara again"]["tok_s"]) / 2 for r in measured]
    speeds = {"nagara": own} | {name: [r[name]["tok_s"] for r in measured] for name in peers}
    ratios = {name: [a / b for a, b in zip(own, speeds[name], strict=True)] for name in peers}
    return {
        "tok_s": {name: _spread(values) for name, values in speeds.items()},
        "dtype": {name: measured[0][name]["dtype"] for name in ("nagara", *peers)},
        "ratios": {name: _spread(values) for name, values in ratios.items()},
        "load": [r["nagara"]["load"] for r in measured],
    }


def _spread(values: list[float]) -> dict[str, float]:
    shown = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in shown.items()}


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return {"cpu": name, "cores": os.cpu_count(), "kernel": os.uname().release}


def print_table(found: dict[str, Any]) -> None:
    """The same for people."""
    print(
        f"{found['prompts']} prompts, {found['new_tokens']} new tokens each, {found['runs']} runs"
    )
    print(f"{'':10}{'tok/s':>8}{'min':>8}{'max':>8}  {'dtype':16}nagara is faster by")
    for name, speed in found["tok_s"].items():
        ratio = found["ratios"].get(name)
        shown = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else ""
        cells = "".join(f"{speed[key]:8.0f}" for key in ("median", "min", "max"))
        print(f"{name:10}{cells}  {found['dtype'][name]:16}{shown}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--vllm-eager", action="store_true", help="vllm without compiling")
    parser.add_argument(
        "--small",
        action="store_true",
        help="one round, 8 prompts, 16 tokens, vllm without compiling",
    )
    parser.add_argument("--peers", default="padded,batched,vllm")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.runs, args.prompts, args.tokens, args.vllm_eager = 1, 8, 16, True
    peers = [name for name in args.peers.split(",") if name]
    if unknown := [name for name in peers if name not in PROGRAMS]:
        parser.error(f"unknown peers {', '.join(unknown)}; known: {', '.join(PROGRAMS)}")
    draw = random.Random(0)
    prompts = [
        [draw.randrange(100, 40000) for _ in range(draw.randrange(32, 128))]
        for _ in range(args.prompts)
    ]
    mode = "eager" if args.vllm_eager else "default"
    measured = rounds(peers, args.model, prompts, args.tokens, args.runs, mode)
    found = {
        "machine": machine(),
        "command": " ".join(["bench/peers/engine.py", *sys.argv[1:]]),
        "prompts": args.prompts,
        "new_tokens": args.tokens,
        "vllm_mode": mode,
        "runs": args.runs,
        **figures(peers, measured),
        "rounds": measured,
    }
    if args.json:
        print(json.dumps(found))
    else:
        print_table(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
