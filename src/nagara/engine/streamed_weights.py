"""A model's weights in memory of their own, streamed from their files, released and read again.

Takes the place of `MappedWeights` where weights cannot stay mapped: on a GPU, and on a CPU when
that is asked for. `take` only says where a tensor will be; `begin` starts reading and `finish`
waits for it, so that whatever needs no values can be done in between. The values of the first
reading, judged by the folder's own record if it has one, are what every later one is judged by.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nagara.engine.errors import ModelFolderError
from nagara.engine.modelfolder import ModelFolder, TensorPlace
from nagara.engine.weight_memory import ALIGNMENT, WeightMemory
from nagara.engine.weight_stream import Progress, Streamed, WeightStream
from nagara.engine.weight_values import read_values
from nagara.engine.weights import TORCH_DTYPES, checked_place


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of the folder at its place in the memory."""

    place: TensorPlace
    start: int


def can_stream(folder: ModelFolder, dtype: torch.dtype) -> bool:
    """Whether all weights are stored in the type they are computed in: bytes are not changed.

    Old folders also hold the ropes' frequencies, in float32; they are computed, not taken.
    """
    places = (p for p in folder.tensors.values() if not p.name.endswith("inv_freq"))
    return all(TORCH_DTYPES.get(place.dtype) is dtype for place in places)


class StreamedWeights:
    """Raises `ModelFolderError` from any of its calls when the files are not what they should be.

    Args:
        readers: threads that read.
    """

    def __init__(self, folder: ModelFolder, memory: WeightMemory, *, readers: int) -> None:
        self._folder, self._memory, self._readers = folder, memory, readers
        self._placed: dict[str, _Placed] = {}
        start = 0
        for place in folder.tensors.values():
            self._placed[place.name] = _Placed(place, start)
            start += -(-(place.end - place.start) // ALIGNMENT) * ALIGNMENT
        self._bytes = memory.allocate(start)
        self._wanted: set[str] = set()
        self._values = read_values(folder.path)
        self._stream: WeightStream | None = None
        self.copied_bytes = 0  # as `MappedWeights` has it: none has changed its type

    def __contains__(self, name: str) -> bool:
        return name in self._placed

    @property
    def can_release(self) -> bool:
        return self._memory.can_release

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name; it has its values once `finish` has returned.

        Raises:
            ModelFolderError: the folder has no such tensor, or one of another shape.
        """
        place = checked_place(self._folder, name, shape)
        start = self._placed[name].start
        self._wanted.add(name)
        flat = self._bytes[start : start + place.end - place.start]
        return flat.view(TORCH_DTYPES[place.dtype]).view(place.shape)

    def begin(self) -> None:
        """Starts reading what has been taken."""
        targets = [
            (placed.place, self._memory.target(placed.start))
            for name, placed in self._placed.items()
            if name in self._wanted
        ]
        expected = {k: v for k, v in (self._values or {}).items() if k in self._wanted}
        self._stream = WeightStream(
            targets, expected, readers=self._readers, make_slot=self._memory.make_slot
        )
        self._stream.begin()

    def finish(self, tell: Callable[[Progress], None] | None = None) -> Streamed:
        """Waits until all values are there and right; `tell` as in `WeightStream.finish`."""
        if self._stream is None:
            raise ModelFolderError("was not begun to be read", where=str(self._folder.path))
        done = self._stream.finish(tell)
        self._values = dict(done.values)
        return done

    def release(self) -> None:
        """Gives the memory up. The tensors keep their places and lose their values."""
        self._memory.release()

    def reload(self, tell: Callable[[Progress], None] | None = None) -> Streamed:
        """Has the memory and all values again; `tell` as in `WeightStream.finish`."""
        self._memory.resume()
        self.begin()
        return self.finish(tell)
