"""Where the time of a start goes on a machine with one GPU, and what a restore saves of it.

    python bench/gpu_coldstart.py                       all parts, a 1B and an 8B shape
    python bench/gpu_coldstart.py --shape 1b --parts plain,warm,device
    python bench/gpu_coldstart.py --criu ./criu/criu    a CRIU that was brought along as files
    python bench/gpu_coldstart.py --device cpu --shape tiny --no-compile     without a GPU

Parts, each of which skips by itself with its reason:

    link      pinned host memory to the device: the bound of all streaming
    weights   the model streamed to the device, its values checked, against the link
    plain     a start with nothing cached: context, weights, torch.compile, graphs, first token
    warm      the same with warm page cache and compile cache
    device    out of and back to the device through the driver, without CRIU
    full      host and device: CRIU and the driver

Needs no network: torch, numpy, safetensors and `src/` beside this folder; the models are random and
made in the scratch folder. `device` wants driver 570 and cuda-core or cuda-checkpoint, and
nvidia-ml-py; `full` wants root and CRIU besides. A waterfall on standard error, one JSON object on
standard output.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
sys.path.insert(0, str(SOURCE))

PARTS = ("link", "weights", "plain", "warm", "device", "full")
STAGES = ("libraries", "context", "weights", "model", "compile and graphs", "first token")
PROMPT, NEW = 64, 8
WAIT_S = 1800.0
COPY_BYTES, COPIES = 1 << 30, 5
Skipped = dict[str, str]


class SkipError(Exception):
    """A part cannot be measured here; why."""


# The process that is started, saved and put back


class Worker:
    """Loads the model, generates, sleeps and wakes, as it is told through files.

    Files rather than pipes: nothing connects it with whoever measures when it is saved.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stages: dict[str, float] = {}
        self._marked_s = time.perf_counter()

    def mark(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now_s - self._marked_s
        self._marked_s = now_s

    def set_up(self) -> None:
        import torch
        from gpu import make_config

        from nagara.engine.flat import FlatModel
        from nagara.engine.flat_weights import take_flat_weights
        from nagara.engine.graphs import CudaGraphs, RecordedGraphs
        from nagara.engine.modelfolder import ModelFolder, read_safetensors_header
        from nagara.engine.simulated import build_core
        from nagara.engine.streamed_weights import StreamedWeights
        from nagara.engine.streams import cuda_device, worker_device
        from nagara.engine.weight_memory import CudaMemory, HostMemory, find_memory_saver

        self.mark("libraries")
        is_cuda = self.args.device == "cuda"
        device = torch.device(self.args.device)
        if is_cuda:
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        self.mark("context")
        config = make_config(self.args.shape, PROMPT + NEW + 16)
        file = Path(self.args.model)
        folder = ModelFolder(file.parent, {}, read_safetensors_header(file))
        memory = CudaMemory(device, find_memory_saver()) if is_cuda else HostMemory()
        self.weights = StreamedWeights(folder, memory, readers=self.args.readers)
        taken = take_flat_weights(config, self.weights)
        self.weights.begin()
        self.weights.finish()
        self.mark("weights")
        is_compiled = not self.args.no_compile
        model = FlatModel(config, taken, torch.bfloat16, device, is_compiled=is_compiled)
        graphs = CudaGraphs() if is_cuda else RecordedGraphs()
        streams = cuda_device() if is_cuda else worker_device()
        blocks = 8 * -(-(PROMPT + NEW + 16) // 16)
        self.core = build_core(
            model, streams, 1, slots=4, blocks=blocks, context=PROMPT + NEW + 16,
            chunk_rows=128, graphs=None if is_compiled and not is_cuda else graphs,
            is_caching=False,
        )  # fmt: skip
        self.mark("model")
        self.generate()
        self.mark("compile and graphs")
        self.generate()
        self.mark("first token")

    def generate(self) -> list[list[int]]:
        import random

        from nagara.engine.request import SamplingParams
        from nagara.engine.simulated import make_sequence

        draw = random.Random(0)
        params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        prompts = [[draw.randrange(256) for _ in range(PROMPT)] for _ in range(2)]
        sequences = [make_sequence(i, prompt, params) for i, prompt in enumerate(prompts)]
        for sequence in sequences:
            self.core.scheduler.add(sequence)
        while self.core.has_work:
            self.core.step()
        return [sequence.outputs for sequence in sequences]

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "generate":
            began_s = time.perf_counter()
            return {"tokens": self.generate(), "seconds": time.perf_counter() - began_s}
        if request["do"] == "sleep":
            if self.weights.can_release:
                self.weights.release()
            return {"released": self.weights.can_release}
        if request["do"] == "wake":
            if not self.weights.can_release:
                return {"size_bytes": 0, "seconds": 0.0}
            done = self.weights.reload()
            return {"size_bytes": done.size_bytes, "seconds": done.seconds}
        raise ValueError(request)

    def run(self) -> None:
        """Answers until the process is killed, or for half an hour without being asked."""
        folder = Path(self.args.worker)
        self.set_up()
        write(folder / "answer-0", {"stages": self.stages, "pid": os.getpid()})
        number, asked_s = 1, time.monotonic()
        while time.monotonic() - asked_s < WAIT_S:
            command = folder / f"command-{number}"
            if not command.exists():
                time.sleep(0.001)
                continue
            write(folder / f"answer-{number}", self.handle(json.loads(command.read_text())))
            number, asked_s = number + 1, time.monotonic()


def write(file: Path, value: Any) -> None:
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(value))
    temporary.rename(file)


# Whoever measures


class Process:
    """One worker and the folder through which it is spoken to."""

    def __init__(self, bench: "Bench", shape: str, caches: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=bench.scratch, prefix="worker-"))
        self._log = (self.folder / "log").open("wb")
        args = bench.args
        command = [sys.executable, __file__, "--worker", str(self.folder), "--shape", shape]
        command += ["--device", args.device, "--model", str(bench.model(shape))]
        command += ["--readers", str(args.readers), *(["--no-compile"] if args.no_compile else [])]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes beside it that were saved, too
        }
        self.began_s = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.asked = 0

    def first(self) -> dict[str, Any]:
        """What it says when it has generated its first tokens."""
        return self._answer(0)

    def ask(self, what: str) -> dict[str, Any]:
        self.asked += 1
        write(self.folder / f"command-{self.asked}", {"do": what})
        return self._answer(self.asked)

    def _answer(self, number: int) -> dict[str, Any]:
        file, end_s = self.folder / f"answer-{number}", time.monotonic() + WAIT_S
        while not file.exists():
            if not Path(f"/proc/{self.pid}").exists() or self.process.poll() not in (None, -9):
                raise SkipError(f"the process ended: {self._last_line()}")
            if time.monotonic() > end_s:
                raise SkipError(f"no answer in {WAIT_S:.0f} s")
            time.sleep(0.001)
        return json.loads(file.read_text())

    def _last_line(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self._log.close()


class Bench:
    """The parts, with what they share. Results of one are used by later ones."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch = args, scratch
        self.link_bytes_s: float | None = None
        self._models: dict[str, Path] = {}
        self.caches = scratch / "caches"

    def model(self, shape: str) -> Path:
        """The shape's random weights, made once."""
        if shape not in self._models:
            self._models[shape] = make_model(shape, self.scratch / f"{shape}.safetensors")
        return self._models[shape]

    @contextlib.contextmanager
    def started(self, shape: str, caches: Path) -> Iterator[Process]:
        process = Process(self, shape, caches)
        try:
            yield process
        finally:
            process.end()

    def link(self, _shape: str) -> dict[str, Any]:
        import torch

        if self.args.device != "cuda":
            raise SkipError("there is no link without a device")
        pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        rates = []
        for _ in range(COPIES):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            there.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(COPY_BYTES / (time.perf_counter() - began_s))
        self.link_bytes_s = statistics.median(rates)
        return {"gb_s": self.link_bytes_s / 1e9}

    def weights(self, shape: str) -> dict[str, Any]:
        import torch

        from nagara.engine.modelfolder import ModelFolder, read_safetensors_header
        from nagara.engine.streamed_weights import StreamedWeights
        from nagara.engine.weight_memory import CudaMemory, HostMemory

        file = self.model(shape)
        folder = ModelFolder(file.parent, {}, read_safetensors_header(file))
        is_cuda = self.args.device == "cuda"
        memory = CudaMemory(torch.device("cuda"), None) if is_cuda else HostMemory()
        weights = StreamedWeights(folder, memory, readers=self.args.readers)
        for place in folder.tensors.values():
            weights.take(place.name, place.shape)
        found: dict[str, Any] = {"readers": self.args.readers}
        for source in ("disk", "page_cache"):
            is_cold = source == "disk" and give_up(file)
            if source == "page_cache":
                file.read_bytes()
            weights.begin()
            done = weights.finish()
            found |= {f"{source}_gb_s": done.gb_s, f"{source}_is_cold": is_cold}
        found["size_bytes"] = done.size_bytes
        if self.link_bytes_s:
            found["of_link"] = found["page_cache_gb_s"] * 1e9 / self.link_bytes_s
        return found

    def plain(self, shape: str) -> dict[str, Any]:
        shutil.rmtree(self.caches, ignore_errors=True)
        is_cold = give_up(self.model(shape))
        return {**self._start(shape), "page_cache_is_cold": is_cold}

    def warm(self, shape: str) -> dict[str, Any]:
        self._start(shape)  # whatever `plain` has not left behind
        return self._start(shape)

    def _start(self, shape: str) -> dict[str, Any]:
        with self.started(shape, self.caches) as process:
            first = process.first()
            total_s = time.perf_counter() - process.began_s
        return {"total_s": total_s, "stages": first["stages"]}

    def device(self, shape: str) -> dict[str, Any]:
        orders = find_orders(self.args.device)
        with self.started(shape, self.caches) as process:
            plain = process.first()["stages"]
            expected = process.ask("generate")["tokens"]
            released = process.ask("sleep")["released"]
            began_s = time.perf_counter()
            record = orders.save({process.pid: 1})
            saved_s = time.perf_counter() - began_s
            if record is None:
                raise SkipError("the driver does not know the process")
            began_s = time.perf_counter()
            orders.put_back(record, {1: process.pid})
            restored_s = time.perf_counter() - began_s
            read = process.ask("wake")
            answer = process.ask("generate")
            total_s = time.perf_counter() - began_s
        plain_s = sum(plain[stage] for stage in ("context", "model", "compile and graphs"))
        return {
            "saved_s": saved_s,
            "total_s": total_s,
            "stages": {
                "device": restored_s,
                "weights": read["seconds"],
                "first token": answer["seconds"],
            },
            "held_bytes": sum(record.processes[0].held_bytes.values()),
            "weights_released": released,
            "tokens_equal": answer["tokens"] == expected,
            "plain_device_s": plain_s,
            "times_faster": plain_s / restored_s,
        }

    def full(self, shape: str) -> dict[str, Any]:
        criu = find_criu(self.args.criu)
        orders = find_orders(self.args.device, or_none=True)
        images = Path(tempfile.mkdtemp(dir=self.scratch, prefix="images-"))
        with self.started(shape, self.caches) as process:
            process.first()
            expected = process.ask("generate")["tokens"]
            process.ask("sleep")
            record = orders.save({process.pid: 1}) if orders else None
            began_s = time.perf_counter()
            run_criu(criu, "dump", images, "--tree", str(process.pid))
            dumped_s = time.perf_counter() - began_s
            process.process.wait(60)
            give_up(*images.iterdir(), self.model(shape))
            began_s = time.perf_counter()
            run_criu(criu, "restore", images, "--restore-detached")
            host_s = time.perf_counter() - began_s
            if orders and record:
                orders.put_back(record, {1: process.pid})
            device_s = time.perf_counter() - began_s - host_s
            read = process.ask("wake")
            answer = process.ask("generate")
            total_s = time.perf_counter() - began_s
        return {
            "dumped_s": dumped_s,
            "snapshot_bytes": sum(file.stat().st_size for file in images.iterdir()),
            "total_s": total_s,
            "stages": {
                "host": host_s,
                "device": device_s,
                "weights": read["seconds"],
                "first token": answer["seconds"],
            },
            "tokens_equal": answer["tokens"] == expected,
            **self._bound(shape, host_s, device_s, total_s),
        }

    def _bound(self, shape: str, host_s: float, device_s: float, total_s: float) -> dict[str, Any]:
        """The same bound as `nagara bench device` has, from this run's own rates."""
        if not self.link_bytes_s:
            return {"bound_s": None}
        size = self.model(shape).stat().st_size
        give_up(self.model(shape))
        began_s = time.perf_counter()
        read_all(self.model(shape))
        storage_s = time.perf_counter() - began_s
        bound_s = max(host_s, storage_s) + device_s + size / self.link_bytes_s
        return {"bound_s": bound_s, "ratio": total_s / bound_s}


def find_orders(device: str, *, or_none: bool = False) -> Any:
    from nagara.snapshot.device.cuda import CudaDevice
    from nagara.snapshot.device.orders import DeviceOrders
    from nagara.snapshot.errors import SnapshotError

    if device != "cuda":
        if or_none:
            return None
        raise SkipError("there is no device")
    cuda = CudaDevice()
    try:
        facts = cuda.facts()
    except SnapshotError as error:
        raise SkipError(error.what) from error
    if not facts.can_save:
        raise SkipError(facts.why_not or "the driver cannot save")
    return DeviceOrders(cuda)


def find_criu(named: str | None) -> Path:
    found = named or shutil.which("criu")
    if os.geteuid() != 0:
        raise SkipError("needs root")
    if found is None or not Path(found).exists():
        raise SkipError("there is no CRIU; --criu names one")
    return Path(found)


def run_criu(criu: Path, verb: str, images: Path, *more: str) -> None:
    command = [str(criu), verb, "--images-dir", str(images), "--log-file", f"{verb}.log", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log = images / f"{verb}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else [done.stderr]
        errors = [line for line in lines if "Error" in line] or lines[-1:]
        raise SkipError(f"criu {verb}: {errors[0] if errors else done.returncode}")


def make_model(shape: str, file: Path) -> Path:
    """Random weights small enough that activations keep their size, as safetensors."""
    import torch
    from gpu import make_config
    from safetensors.torch import save_file

    c = make_config(shape, 1024)
    draw = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=draw) * inputs**-0.5).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(c.hidden, dtype=torch.bfloat16)

    note(f"making the {shape} shape's weights")
    tensors = {"model.embed_tokens.weight": matrix(c.vocab, c.hidden), "model.norm.weight": ones()}
    tensors["lm_head.weight"] = matrix(c.vocab, c.hidden)
    kv = c.kv_heads * c.head_dim
    for number in range(c.layers):
        layer = f"model.layers.{number}."
        tensors |= {
            f"{layer}input_layernorm.weight": ones(),
            f"{layer}post_attention_layernorm.weight": ones(),
            f"{layer}self_attn.q_proj.weight": matrix(c.heads * c.head_dim, c.hidden),
            f"{layer}self_attn.k_proj.weight": matrix(kv, c.hidden),
            f"{layer}self_attn.v_proj.weight": matrix(kv, c.hidden),
            f"{layer}self_attn.o_proj.weight": matrix(c.hidden, c.heads * c.head_dim),
            f"{layer}mlp.gate_proj.weight": matrix(c.intermediate, c.hidden),
            f"{layer}mlp.up_proj.weight": matrix(c.intermediate, c.hidden),
            f"{layer}mlp.down_proj.weight": matrix(c.hidden, c.intermediate),
        }
    save_file(tensors, file)
    os.sync()
    return file


def give_up(*files: Path) -> bool:
    """Takes files out of the page cache; whether the kernel was asked to."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return bool(files)


def read_all(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(8 << 20):
            pass


def measured(part: Callable[[str], dict[str, Any]], shape: str) -> dict[str, Any] | Skipped:
    from nagara.base.errors import NagaraError
    from nagara.engine.errors import EngineError

    try:
        return part(shape)
    except SkipError as error:
        return {"skipped": str(error)}
    except (NagaraError, EngineError, RuntimeError, OSError) as error:
        return {"skipped": f"failed: {error}"}


def draw_waterfall(name: str, found: dict[str, Any]) -> None:
    if "skipped" in found:
        note(f"  {name:8} skipped: {found['skipped']}")
        return
    if "stages" not in found:
        note(f"  {name:8} " + ", ".join(f"{k} {v:.3g}" for k, v in found.items() if v is not None))
        return
    note(f"  {name:8} {found['total_s']:8.2f} s")
    for stage, seconds in found["stages"].items():
        bar = "█" * round(40 * seconds / max(found["total_s"], 1e-9))
        note(f"           {seconds:8.3f} s  {stage:20} {bar}")


def note(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="1b,8b", help="of 1b, 8b, tiny; several with commas")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--criu", help="the program, where it is not on the path")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        Worker(args).run()
        return
    known = os.environ.get("PYTHONPATH")  # what asks the driver is a process of its own
    os.environ["PYTHONPATH"] = f"{SOURCE}:{known}" if known else str(SOURCE)
    import torch

    if unknown := set(args.parts.split(",")) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is usable; try --device cpu --shape tiny --no-compile")
    facts = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": not args.no_compile,
    }
    shapes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="gpu-coldstart-") as scratch:
        bench = Bench(args, Path(scratch))
        for shape in args.shape.split(","):
            note(shape)
            shapes[shape] = {}
            for part in (part for part in PARTS if part in args.parts.split(",")):
                shapes[shape][part] = measured(getattr(bench, part), shape)
                draw_waterfall(part, shapes[shape][part])
    sys.stdout.write(json.dumps({**facts, "shapes": shapes}) + "\n")


if __name__ == "__main__":
    main()
