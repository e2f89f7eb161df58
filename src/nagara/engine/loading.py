"""From a model folder to a model that computes: checks, type, and the choice of the kernel."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from nagara.engine.adapter import AdaptedModel
from nagara.engine.config import (
    FLAT_MODEL_TYPES,
    ModelConfig,
    parse_general_config,
    parse_model_config,
)
from nagara.engine.errors import UnsupportedError
from nagara.engine.flat import FlatModel
from nagara.engine.flat_c import CFlatModel
from nagara.engine.flat_weights import can_pack, pack_weights, take_flat_weights
from nagara.engine.model import StepModel
from nagara.engine.modelfolder import ModelFolder, check_model_folder, read_json_object
from nagara.engine.settings import EngineSettings, cache_blocks
from nagara.engine.streamed_weights import StreamedWeights, can_stream
from nagara.engine.weight_memory import CudaMemory, HostMemory, find_memory_saver
from nagara.engine.weight_stream import NoTarget, Progress, Streamed, WeightStream
from nagara.engine.weight_values import read_values
from nagara.engine.weights import MappedWeights, pick_dtype

log = logging.getLogger("nagara.engine")


class Reading(Protocol):
    """Weights that are being read."""

    def finish(self, tell: Callable[[Progress], None] | None = None) -> Streamed: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the limits that follow from it and the settings."""

    model: StepModel
    config: ModelConfig
    context: int
    blocks: int
    weight_bytes: int
    copied_bytes: int
    dtype: torch.dtype = torch.float32
    streamed: StreamedWeights | None = None  # not mapped: in memory that can be released
    reading: Reading | None = None  # weights under way, or looked at; None: nothing to wait for

    def finish(self) -> Streamed | None:
        """Waits until weights are there and right; nothing may be computed before.

        Returns what was read; None where nobody had to read them.

        Raises:
            ModelFolderError: they are not what they should be.
        """
        if self.reading is None:
            return None
        done = self.reading.finish(log_progress)
        log_streamed(done)
        return done


def load_model(path: Path, settings: EngineSettings) -> LoadedModel:
    """Check the folder and build the model over its weights; nothing is computed yet.

    Weights may still be on their way: `LoadedModel.finish` waits for them.

    Raises:
        EngineError: the folder is broken or asks for something unsupported.
    """
    started = time.monotonic()
    folder = check_model_folder(path)
    generation_file = folder.path / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.exists() else None
    config, is_flat = choose_path(folder.config, generation, settings)
    dtype = pick_dtype(settings.dtype, config.dtype)
    streamed = _streamed(folder, dtype, settings, is_flat=is_flat)
    reading = streamed or _checking(folder, settings)
    model, copied = build_model(folder, config, dtype, settings, streamed, is_flat=is_flat)
    if settings.is_batch_invariant and not model.is_batch_invariant:
        raise UnsupportedError(
            f"results of the kernel {model.kernel!r} depend on the batch in their last bits",
            where="batch_invariant",
            hint="kernel c, on a CPU with a compiler",
        )
    context = min(settings.context or config.context, config.context)
    blocks = cache_blocks(settings, config, context, dtype.itemsize)
    context = min(context, blocks * settings.block_size)
    log.info(
        "model mapped in %.2f s: %s, %d layers, %s, kernel %s, %.0f MB of weights, "
        "%.0f MB of them copied; cache of %d tokens, context %d",
        time.monotonic() - started,
        config.model_type,
        config.layers,
        str(dtype).removeprefix("torch."),
        model.kernel,
        folder.weight_bytes / 1e6,
        copied / 1e6,
        blocks * settings.block_size,
        context,
    )
    return LoadedModel(
        model, config, context, blocks, folder.weight_bytes, copied, dtype, streamed, reading
    )


def choose_path(
    raw: dict[str, Any], generation: dict[str, Any] | None, settings: EngineSettings
) -> tuple[ModelConfig, bool]:
    """The configuration, and whether the forward pass is our own.

    A member of a known family with a feature that our forward lacks goes to transformers' code.

    Raises:
        UnsupportedError: neither computes it, or not the asked kernel.
    """
    if is_flat_type(raw, settings.kernel):
        try:
            return parse_model_config(raw, generation), True
        except UnsupportedError as error:
            if settings.kernel != "auto" or settings.is_compiled:
                raise
            log.info("computing with transformers: %s", error.what)
    return parse_general_config(raw, generation), False


def build_model(
    folder: ModelFolder,
    config: ModelConfig,
    dtype: torch.dtype,
    settings: EngineSettings,
    streamed: StreamedWeights | None = None,
    *,
    is_flat: bool,
) -> tuple[StepModel, int]:
    """The model and how many bytes of weights had to be copied. Streamed ones are under way."""
    if not is_flat:
        adapted = AdaptedModel(folder.path, config, dtype, settings.device)
        return adapted, adapted.weight_bytes
    device = torch.device(settings.device)
    weights = streamed or MappedWeights(folder, dtype)
    taken = take_flat_weights(config, weights)
    if streamed is not None:
        streamed.begin()
    if _wants_c(settings):
        try:
            return CFlatModel(config, taken, dtype, settings.block_size), weights.copied_bytes
        except UnsupportedError as error:
            if settings.kernel == "c":
                raise
            log.info("computing with torch: %s", error.what)
    copied = weights.copied_bytes
    if device.type != "cpu":
        taken = taken if streamed is not None else taken.to(device)
    elif _wants_packed(settings, dtype):
        taken, packed = pack_weights(taken)
        copied += packed
    return FlatModel(config, taken, dtype, device, is_compiled=settings.is_compiled), copied


def _streamed(
    folder: ModelFolder, dtype: torch.dtype, settings: EngineSettings, *, is_flat: bool
) -> StreamedWeights | None:
    """Where weights are streamed to; None where they are mapped, or cannot be streamed.

    Raises:
        UnsupportedError: they cannot be, and it was asked for.
    """
    if settings.weights != "streamed" and settings.device == "cpu":
        return None
    if not is_flat or not can_stream(folder, dtype):
        if settings.weights == "streamed":
            raise UnsupportedError(
                "weights are streamed in the type they are stored in, and for models whose "
                "forward pass is the engine's own",
                where="weights",
                hint="--weights auto, or --dtype auto",
            )
        return None
    memory = (
        HostMemory()
        if settings.device == "cpu"
        else CudaMemory(torch.device(settings.device), find_memory_saver())
    )
    return StreamedWeights(folder, memory, readers=settings.readers)


def _checking(folder: ModelFolder, settings: EngineSettings) -> WeightStream | None:
    """Begins to look at mapped weights where it is known which values they have to have."""
    if (values := read_values(folder.path)) is None:
        return None
    nowhere = NoTarget()
    targets = [(place, nowhere) for place in folder.tensors.values()]
    stream = WeightStream(targets, values, readers=settings.readers)
    stream.begin()
    return stream


def log_progress(now: Progress) -> None:
    done, total = now.done_bytes / 1e9, now.total_bytes / 1e9
    log.info("weights: %.1f of %.1f GB, %.2f GB/s", done, total, now.gb_s)


def log_streamed(done: Streamed) -> None:
    log.info(
        "%.0f MB of weights read and checked in %.2f s: %.2f GB/s, %.0f %% of them cached",
        done.size_bytes / 1e6,
        done.seconds,
        done.gb_s,
        100 * done.cached_bytes / max(1, done.size_bytes),
    )


def _wants_packed(settings: EngineSettings, dtype: torch.dtype) -> bool:
    is_possible = not settings.is_compiled and settings.weights != "streamed" and can_pack(dtype)
    if settings.pack == "on" and not is_possible:
        raise UnsupportedError(
            "weights cannot be packed: that needs bfloat16, a processor that multiplies it, and no "
            "compilation",
            where="pack",
        )
    return settings.pack != "off" and is_possible


def is_flat_type(config: dict[str, Any], kernel: str) -> bool:
    """Whether the forward pass is our own.

    Raises:
        UnsupportedError: the asked kernel cannot compute this architecture.
    """
    is_known = config.get("model_type") in FLAT_MODEL_TYPES
    if not is_known and kernel in ("c", "torch"):
        raise UnsupportedError(
            f"the {kernel} kernel does not compute {config.get('model_type')!r}",
            where="kernel",
            hint="auto or transformers",
        )
    return is_known and kernel != "transformers"


def _wants_c(settings: EngineSettings) -> bool:
    is_possible = settings.device == "cpu" and not settings.is_compiled and settings.pack != "on"
    if settings.kernel == "c" and not is_possible:
        raise UnsupportedError(
            "the C kernel is for the CPU, and for weights that are not packed", where="kernel"
        )
    return settings.kernel == "c" or (settings.kernel == "auto" and is_possible)
