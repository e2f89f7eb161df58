"""How an engine runs, as one frozen value; what cannot be honoured is refused at start."""

import os
from dataclasses import dataclass
from pathlib import Path

from nagara.engine.config import ModelConfig
from nagara.engine.errors import UnsupportedError

KERNELS = ("auto", "c", "torch", "transformers")
DEVICES = ("cpu", "cuda")
CACHE_SHARE = 0.3  # of the memory that is free at start, when no size is given


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises UnsupportedError for values that contradict each other."""

    dtype: str = "auto"  # auto takes the stored type
    device: str = "cpu"
    kernel: str = "auto"
    pack: str = "auto"  # repack weights for speed (copied into memory): auto, on, off
    depth: int = 1  # steps in flight beyond the one being read; 0 does one thing at a time
    max_concurrency: int = 16  # sequences computed at once; more wait their turn
    max_waiting: int = 1024  # requests beyond the running ones; more are refused
    context: int | None = None  # at most the model's own
    cache_tokens: int | None = None  # size of the KV cache; None measures the free memory
    block_size: int = 16
    chunk_rows: int = 256  # prefill rows of one step, fewer late in long prompts: bounds the gaps
    has_prefix_cache: bool = True
    is_compiled: bool = False
    has_graphs: bool = True  # on CUDA: steps in which everyone generates are captured and replayed
    is_batch_invariant: bool = False  # refuse what computes a row differently beside other rows
    weights: str = (
        "auto"  # mapped from their files (on a CPU), or streamed into memory of their own
    )
    readers: int = 4  # threads that stream weights
    is_checking: bool = False  # poison what nobody may read and audit the cache when idle

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("kernel", self.kernel, KERNELS)
        _one_of("weights", self.weights, ("auto", "mapped", "streamed"))
        if self.weights == "mapped" and self.device != "cpu":
            raise UnsupportedError("only a CPU computes with mapped weights", where="weights")
        _one_of("pack", self.pack, ("auto", "on", "off"))
        if self.depth not in (0, 1):
            raise UnsupportedError("depth must be 0 or 1", where="depth")
        for name in ("max_concurrency", "max_waiting", "block_size", "chunk_rows", "readers"):
            if getattr(self, name) < 1:
                raise UnsupportedError(f"{name} must be at least 1", where=name)
        if self.is_compiled and self.kernel not in ("auto", "torch"):
            raise UnsupportedError(
                f"compile does not go with kernel {self.kernel!r}",
                where="compile",
                hint="only the torch kernel is compiled by torch.compile",
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedError(f"{name} {value!r} is unknown", where=name, hint=", ".join(allowed))


def cache_blocks(settings: EngineSettings, config: ModelConfig, context: int, itemsize: int) -> int:
    """How many blocks the KV cache gets: as set, else what concurrency can use and memory holds.

    Without a setting one whole context always fits: memory is taken only as it is used.

    Raises:
        UnsupportedError: not even one block's worth of tokens.
    """
    size = settings.block_size
    if settings.cache_tokens is not None:
        blocks = settings.cache_tokens // size
        if blocks < 1:
            raise UnsupportedError(f"needs at least {size} tokens", where="cache_tokens")
        return blocks
    one = -(-context // size)
    useful = settings.max_concurrency * one
    held = int(free_memory_bytes(settings.device) * CACHE_SHARE) // block_bytes(
        config, size, itemsize
    )
    return max(one, min(useful, held))


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Keys and values of one block of tokens, in all layers."""
    return config.layers * 2 * config.kv_heads * config.head_dim * itemsize * block_size


def free_memory_bytes(device: str) -> int:
    """Memory that can still be used, on the device or of this machine (or its control group)."""
    if device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(free)
    limits = [_available_bytes()]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        limits.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
    return max(0, min(limits))


def _available_bytes() -> int:
    """What Linux would give without swapping, page cache included."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
