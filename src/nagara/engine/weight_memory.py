"""Memory for weights that can be given up and had again at the same addresses.

Whatever refers to the tensors, compiled code and captured graphs among it, stays valid; only the
contents are gone until they are read again. On a CPU these are pages of this process's own. On a
GPU it is done by the package `torch-memory-saver`, through the driver's virtual memory calls;
without it the memory cannot be given up and stays.
"""

import ctypes
import importlib
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from nagara.engine.weight_stream import HostSlot, HostTarget, Slot, Target
from nagara.engine.weight_values import PIECE_BYTES, carry, fold

ALIGNMENT = 256  # bytes; what any kernel may want
_PAGE = 4096
log = logging.getLogger("nagara.engine")


class WeightMemory(Protocol):
    """One piece of memory. `can_release`: it can be given up with its addresses kept."""

    can_release: bool

    def allocate(self, size: int) -> torch.Tensor:
        """All of it, as bytes; called once."""

    def target(self, start: int) -> Target:
        """Where a tensor that begins at `start` is streamed to."""

    def make_slot(self, size: int) -> Slot:
        """What is read into on the way."""

    def release(self) -> None: ...

    def resume(self) -> None: ...


class HostMemory:
    """Pages of this process."""

    can_release = True

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._address = 0

    def allocate(self, size: int) -> torch.Tensor:
        self._pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._pages))
        return torch.frombuffer(self._pages, dtype=torch.uint8)

    def target(self, start: int) -> Target:
        return HostTarget(self._address + start)

    def make_slot(self, size: int) -> Slot:
        return HostSlot(size)

    def release(self) -> None:
        assert self._pages is not None
        self._pages.madvise(mmap.MADV_DONTNEED)

    def resume(self) -> None:
        pass  # pages come back, as zeros, when they are written


class MemorySaver(Protocol):
    """What is used of `torch_memory_saver`: memory made in a region goes and comes by its tag."""

    def region(self, tag: str) -> Any: ...

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...


@cache
def find_memory_saver() -> MemorySaver | None:
    """The package, set to work through torch's own allocators; None where it is not installed.

    One for the process: how it works can be set before its first use only.
    """
    try:
        module = importlib.import_module("torch_memory_saver")
    except ImportError:
        log.warning(
            "torch-memory-saver is not installed: weights stay on the device while asleep, and "
            "captured graphs are made anew after it"
        )
        return None
    saver: Any = module.torch_memory_saver
    saver.hook_mode = "torch"  # the other mode wants LD_PRELOAD
    return _Saver(saver)


class _Saver:
    def __init__(self, saver: Any) -> None:
        self._saver = saver

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        with self._saver.region(tag=tag, enable_cpu_backup=False):
            yield

    def pause(self, tag: str) -> None:
        torch.cuda.synchronize()
        self._saver.pause(tag)

    def resume(self, tag: str) -> None:
        self._saver.resume(tag)


class CudaMemory:
    """Memory of the GPU."""

    TAG = "nagara-weights"

    def __init__(self, device: torch.device, saver: MemorySaver | None) -> None:
        self._device, self._saver = device, saver
        self._bytes = torch.empty(0)
        self.can_release = saver is not None

    def allocate(self, size: int) -> torch.Tensor:
        if self._saver is None:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        else:
            with self._saver.region(self.TAG):
                self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes

    def target(self, start: int) -> Target:
        return CudaTarget(self._bytes, start)

    def make_slot(self, size: int) -> Slot:
        return PinnedSlot(size, self._device)

    def release(self) -> None:
        assert self._saver is not None
        self._saver.pause(self.TAG)

    def resume(self) -> None:
        if self._saver is not None:
            self._saver.resume(self.TAG)


class PinnedSlot:
    """Host memory that the device copies from by itself, on a stream of the slot's own."""

    def __init__(self, size: int, device: torch.device) -> None:
        # One piece more, in which what comes from the page cache is folded before it is placed.
        whole = torch.empty(size + PIECE_BYTES + _PAGE, dtype=torch.uint8, pin_memory=True)
        first = -whole.data_ptr() % _PAGE
        self.memory = whole[first : first + size]
        self.address = self.memory.data_ptr()
        self.scratch = self.address + size
        self._whole = whole
        self.view = memoryview((ctypes.c_uint8 * size).from_address(self.address)).cast("B")
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.used = 0  # bytes placed since it was free

    def copy(self, start: int, size: int, to: torch.Tensor) -> None:
        """Lets the device copy a part of the slot."""
        with torch.cuda.stream(self._stream):
            to.copy_(self.memory[start : start + size], non_blocking=True)

    def free(self) -> None:
        self._stream.synchronize()
        self.used = 0


class CudaTarget:
    """A tensor's bytes on the GPU."""

    def __init__(self, memory: torch.Tensor, start: int) -> None:
        self._memory, self._start = memory, start

    def put(self, slot: Slot, start: int, size: int, offset: int) -> bytes:
        assert isinstance(slot, PinnedSlot)
        lanes = fold(slot.address + start, size)
        slot.copy(start, size, self._part(offset, size))
        return lanes

    def take_cached(
        self, file: int, start: int, size: int, slot: Slot, offset: int
    ) -> tuple[int, list[bytes]] | None:
        assert isinstance(slot, PinnedSlot)
        place = slot.used
        if place + size > len(slot.memory):  # many small tensors, each on a border of its own
            return 0, []
        taken = carry(file, start, size, slot.scratch, slot.address + place)
        if taken is not None and taken[0]:
            slot.copy(place, taken[0], self._part(offset, taken[0]))
            slot.used += -(-taken[0] // 64) * 64
        return taken

    def _part(self, offset: int, size: int) -> torch.Tensor:
        return self._memory[self._start + offset : self._start + offset + size]
