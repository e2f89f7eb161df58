"""A model folder in the Hugging Face layout: what lies in it, and where each tensor is.

Knows `config.json`, the safetensors format (8 bytes little-endian header length, a JSON header,
then the tensors' bytes; https://huggingface.co/docs/safetensors) and the shard index. Knows
nothing of architectures and imports no torch, so it may be called from anywhere, by any thread.

Sizes are checked before anything is mapped: a truncated file read through a mapping would end
the whole process with SIGBUS.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.engine.errors import ModelFolderError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor's bytes are: `[start, end)` within `file`."""

    name: str
    file: Path
    dtype: str  # the format's own name, such as "BF16"
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder: its parsed configuration and the place of every tensor."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def weight_bytes(self) -> int:
        return sum(place.end - place.start for place in self.tensors.values())


def check_model_folder(path: str | Path) -> ModelFolder:
    """Look at every file's head and size and return the folder's description.

    Reads no tensor data. Which architectures can be run is not decided here.

    Raises:
        ModelFolderError: a file is missing, unreadable, unparsable or truncated; names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(
            "is not a folder", where=str(folder), hint="give a folder in the Hugging Face layout"
        )
    config = read_json_object(folder / "config.json")
    for name in ("tokenizer.json",):
        read_json_object(folder / name)
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            read_json_object(folder / name)
    tensors: dict[str, TensorPlace] = {}
    for shard, expected in _shards(folder).items():
        found = read_safetensors_header(shard)
        missing = sorted(expected - found.keys())
        if missing:
            raise ModelFolderError(
                f"lacks the tensor {missing[0]!r} that {INDEX_FILE} places there",
                where=str(shard),
                hint="the shards and the index come from different models: fetch them again",
            )
        tensors.update(found)
    if not tensors:
        raise ModelFolderError("holds no tensors", where=str(folder / SINGLE_FILE))
    return ModelFolder(folder, config, tensors)


def read_json_object(file: Path) -> dict[str, Any]:
    """Parse one JSON file that must hold an object.

    Raises:
        ModelFolderError: missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelFolderError(
            "is missing", where=str(file), hint="a model folder needs it"
        ) from None
    except OSError as error:
        raise ModelFolderError(f"cannot be read: {error.strerror}", where=str(file)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"is not valid JSON: {error}", where=str(file)) from error
    if not isinstance(value, dict):
        raise ModelFolderError("must hold a JSON object", where=str(file))
    return value


def read_safetensors_header(file: Path) -> dict[str, TensorPlace]:
    """The places of a safetensors file's tensors, checked against the file's size.

    Raises:
        ModelFolderError: missing, truncated, longer than its header says, or not of the format.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise ModelFolderError("is too short to be a safetensors file", where=str(file))
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ModelFolderError(
                    f"is truncated or no safetensors file: its header claims {length} bytes, "
                    f"the file has {size}",
                    where=str(file),
                )
            raw = stream.read(length)
    except FileNotFoundError:
        raise ModelFolderError(
            "is missing", where=str(file), hint="fetch the shard that the index names"
        ) from None
    except OSError as error:
        raise ModelFolderError(f"cannot be read: {error.strerror}", where=str(file)) from error
    places = _parse_header(file, raw, 8 + length)
    end = max((place.end for place in places.values()), default=8 + length)
    if end != size:
        raise ModelFolderError(
            f"has {size} bytes where its header needs {end}",
            where=str(file),
            hint="the file is truncated or damaged: fetch it again",
        )
    return places


def _parse_header(file: Path, raw: bytes, data_start: int) -> dict[str, TensorPlace]:
    try:
        header = json.loads(raw)
        places: dict[str, TensorPlace] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
                raise ValueError(f"{name!r} has a size or place that is no number")
            place = TensorPlace(
                name, file, entry["dtype"], shape, data_start + start, data_start + end
            )
            _check_size(place)
            places[name] = place
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(
            f"has a safetensors header that cannot be read: {error!r}", where=str(file)
        ) from error
    _check_places(file, places, data_start)
    return places


def _check_places(file: Path, places: Mapping[str, TensorPlace], data_start: int) -> None:
    """As the format wants it: one after the other, without gaps, and nothing belongs to two."""
    end = data_start
    for place in sorted(places.values(), key=lambda place: (place.start, place.end)):
        if place.start != end:
            raise ModelFolderError(
                f"has {place.name!r} at {place.start} where {end} is expected: tensors overlap or "
                "leave a gap",
                where=str(file),
                hint="the file is damaged: fetch it again",
            )
        end = place.end


def _check_size(place: TensorPlace) -> None:
    count = 1
    for n in place.shape:
        count *= n
    if place.dtype not in DTYPE_BYTES:
        return  # an unknown type is refused by whoever wants to load it
    needed = count * DTYPE_BYTES[place.dtype]
    if place.start < 0 or place.end - place.start != needed:
        raise ModelFolderError(
            f"gives {place.name!r} {place.end - place.start} bytes where its shape needs {needed}",
            where=str(place.file),
        )


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Each weights file with the tensors that the index expects in it."""
    single = folder / SINGLE_FILE
    index = folder / INDEX_FILE
    if single.exists():
        return {single: set()}
    if not index.exists():
        hint = "only safetensors weights are loaded"
        if list(folder.glob("*.bin")) or list(folder.glob("*.gguf")):
            hint += ": convert the folder's other weights first"
        raise ModelFolderError("is missing", where=str(single), hint=hint)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError("has no `weight_map`", where=str(index))
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFolderError(
                f"places {tensor!r} in {name!r}, which is not a file name", where=str(index)
            )
        shards.setdefault(folder / name, set()).add(tensor)
    return shards
