"""Tensors of a model folder as private mappings of its files.

A mapped tensor that is never written stays a clean page of the file: it costs no anonymous
memory, is shared by every process that maps the same file, and is not carried along in a
checkpoint of the process. Only a tensor whose type must change is copied.
"""

import mmap
from typing import TYPE_CHECKING, Protocol

import torch

from nagara.engine.errors import ModelFolderError, UnsupportedError
from nagara.engine.modelfolder import ModelFolder, TensorPlace

if TYPE_CHECKING:
    from pathlib import Path

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TensorSource(Protocol):
    """Gives a model's tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


class MappedWeights:
    """Takes tensors out of a checked folder by name.

    `copied_bytes` says how much had to be copied because its type was another.
    """

    def __init__(self, folder: ModelFolder, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._maps: dict[Path, mmap.mmap] = {}
        self.copied_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._folder.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name in the wanted type.

        Raises:
            ModelFolderError: the folder has no such tensor, or one of another shape.
        """
        return self._load(checked_place(self._folder, name, shape))

    def _load(self, place: TensorPlace) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(place.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"{place.name!r} is stored as {place.dtype}", where=str(place.file)
            )
        buffer = self._maps.get(place.file)
        if buffer is None:
            with place.file.open("rb") as stream:
                # ACCESS_COPY is MAP_PRIVATE: torch wants a writable buffer, the file stays as it is
                buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[place.file] = buffer
        count = (place.end - place.start) // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=place.start)
        tensor = flat.view(place.shape)
        if dtype == self._dtype:
            return tensor
        self.copied_bytes += count * self._dtype.itemsize
        return tensor.to(self._dtype)


def checked_place(folder: ModelFolder, name: str, shape: tuple[int, ...]) -> TensorPlace:
    """Where a folder has a tensor.

    Raises:
        ModelFolderError: the folder has no such tensor, or one of another shape.
    """
    place = folder.tensors.get(name)
    if place is None:
        raise ModelFolderError(f"holds no tensor {name!r}", where=str(folder.path))
    if place.shape != shape:
        raise ModelFolderError(
            f"gives {name!r} the shape {place.shape} where the configuration needs {shape}",
            where=str(place.file),
        )
    return place


def pick_dtype(wanted: str, stored: str) -> torch.dtype:
    """The type to compute in; `auto` takes the stored one, and bfloat16 for float16."""
    name = wanted
    if wanted == "auto":
        name = "float32" if stored == "float32" else "bfloat16"
    if name not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"type {wanted!r} is not supported",
            where="dtype",
            hint="auto, " + ", ".join(COMPUTE_DTYPES),
        )
    return COMPUTE_DTYPES[name]
