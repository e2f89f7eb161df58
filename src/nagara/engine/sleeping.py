"""What a sleeping engine gives up, and what it takes back: the KV cache, and weights if wanted.

    asleep   cache dropped, prefixes forgotten; weights' memory released, if it can be and shall
    awake    weights read again and judged → an empty cache, as large as memory now allows

Where memory can be given up with its addresses kept (see `weight_memory`), captured graphs stay
valid as long as the cache fits again; where it cannot, or there is less room than before, the
cache is made anew and the graphs with it. Runs on the step thread.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from nagara.engine.blocks import BlockPool
from nagara.engine.graph_shapes import SPARE_BLOCKS
from nagara.engine.graphs import StepGraphs
from nagara.engine.loading import LoadedModel, log_progress, log_streamed
from nagara.engine.settings import EngineSettings, block_bytes, cache_blocks, free_memory_bytes
from nagara.engine.streams import Device
from nagara.engine.weight_memory import MemorySaver
from nagara.engine.weight_stream import Streamed

CACHE_TAG = "nagara-cache"
FITTING_SHARE = 0.9  # of what is free: something must be left for the steps themselves


@dataclass(frozen=True, slots=True)
class Woken:
    """How an engine came back. `weights`: None where they had never been given up."""

    blocks: int
    weights: Streamed | None
    keeps_graphs: bool


class ShapesWithSpare(Protocol):
    """The number of the block that padded rows use: the first beyond the pool."""

    spare_block: int


class Rest:
    """The cache and the weights of one engine.

    Args:
        saver: gives memory up with its addresses kept; None where nothing can.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: BlockPool,
        device: Device,
        settings: EngineSettings,
        saver: MemorySaver | None,
    ) -> None:
        self._loaded, self._pool, self._device = loaded, pool, device
        self._settings, self._saver = settings, saver
        self._has_released = False

    def make_cache(self) -> None:
        """An empty cache for the pool's blocks."""
        region: Any = self._saver.region(CACHE_TAG) if self._saver else nullcontext()
        with region:
            blocks = self._pool.count + SPARE_BLOCKS
            self._loaded.model.make_cache(blocks, self._settings.block_size)
        self._device.settle()

    def fall_asleep(self, graphs: StepGraphs | None, *, releases_weights: bool) -> None:
        """Gives up the cache, and the weights' memory where it can be given up."""
        self._pool.forget()
        if self._saver is not None:
            self._device.settle()
            self._saver.pause(CACHE_TAG)
        else:
            if graphs is not None:
                graphs.forget()
            self._loaded.model.drop_cache()
        streamed = self._loaded.streamed
        if releases_weights and streamed is not None and streamed.can_release:
            streamed.release()
            self._has_released = True
        self._device.give_back()

    def awake(self, graphs: StepGraphs | None, shapes: ShapesWithSpare | None) -> Woken:
        """Takes everything back.

        Raises:
            ModelFolderError: the weights' files are not what they were.
        """
        done = None
        if self._has_released and self._loaded.streamed is not None:
            done = self._loaded.streamed.reload(log_progress)
            log_streamed(done)
            self._has_released = False
        keeps = self._saver is not None and self._fits_again()
        if keeps:
            assert self._saver is not None
            self._saver.resume(CACHE_TAG)
            self._loaded.model.clear_cache()
            self._device.settle()
        else:
            if graphs is not None:
                graphs.forget()
            self._loaded.model.drop_cache()
            self._device.give_back()
            blocks = self._fitting()
            self._pool.resize(blocks)
            if shapes is not None:
                shapes.spare_block = blocks
            self.make_cache()
        return Woken(self._pool.count, done, keeps)

    def _fits_again(self) -> bool:
        """Whether the cache has room as it was: what is free now is what it had, and more."""
        config, size = self._loaded.model.config, self._settings.block_size
        each = block_bytes(config, size, int(self._loaded.dtype.itemsize))
        wanted = each * (self._pool.count + SPARE_BLOCKS)
        return wanted <= FITTING_SHARE * free_memory_bytes(self._settings.device)

    def _fitting(self) -> int:
        """Blocks that memory has room for now; not fewer than one request of full length needs."""
        loaded, model = self._loaded, self._loaded.model
        itemsize = int(loaded.dtype.itemsize)
        found = cache_blocks(self._settings, model.config, loaded.context, itemsize)
        return max(found, self._pool.blocks_for(loaded.context))
