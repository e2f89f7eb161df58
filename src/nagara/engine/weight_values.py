"""Value hashes of tensors: which values a model's weights have, not merely how many bytes.

A tensor is folded in chunks of 512 KiB, each by itself, so that several readers take part:

    chunk   64 lanes of 64 bits, see kernels/fold.c
    tensor  blake2b over type, shape, size and the lanes of its chunks in their order

Folding runs in C where a compiler is, or was, at hand, and in numpy otherwise, with the same
result. It finds damage and mix-ups; it is no defence against somebody who wants to be undetected,
for whom the store's own names (sha256) are there. The record of a model folder, which
`nagara models add` writes, has the hashes its weights had then.
"""

import ctypes
import errno
import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nagara.engine.errors import ModelFolderError, UnsupportedError
from nagara.engine.kernels.build import load_fold
from nagara.engine.modelfolder import TensorPlace, read_json_object

RECORD_FILE, RECORD_KEY = "nagara-model.json", "weights"
CHUNK_BYTES = 512 << 10  # stays in a core's cache between being read and being folded
PIECE_BYTES = 256 << 10
LANES = 64
_ROW_BYTES = 8 * LANES
_FACTOR = 0x9E3779B97F4A7C15  # as in fold.c


def fold(source: int, size: int, target: int | None = None) -> bytes:
    """The lanes of a chunk at the address `source`, copied to `target` on the way."""
    lanes = (ctypes.c_uint64 * LANES)()
    if (kernels := _kernels()) is not None:
        kernels.fold(target, source, size, lanes)
        return bytes(lanes)
    if target is not None:
        ctypes.memmove(target, source, size)
    return fold_bytes((ctypes.c_uint8 * size).from_address(source))


def carry(
    file: int, start: int, size: int, slot: int, target: int | None
) -> tuple[int, list[bytes]] | None:
    """Folds and copies what the page cache has of a file's `size` bytes at `start`, through
    `PIECE_BYTES` of memory at the address `slot` (without a target: a whole chunk of it).

    How many bytes it had before the first gap, and the lanes of these chunks; None where that
    cannot be asked. Raises OSError.
    """
    if (kernels := _kernels()) is None:
        return _carry_slowly(file, start, size, slot if target is None else target)
    lanes = (ctypes.c_uint64 * (LANES * -(-size // CHUNK_BYTES)))()
    done = kernels.carry(file, start, size, slot, PIECE_BYTES, CHUNK_BYTES, target, lanes)
    if -done in (errno.EOPNOTSUPP, errno.ENOSYS):
        return None
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    text, step = bytes(lanes), 8 * LANES
    return done, [text[at * step : (at + 1) * step] for at in range(-(-done // CHUNK_BYTES))]


def _carry_slowly(file: int, start: int, size: int, target: int) -> tuple[int, list[bytes]] | None:
    """The same without a compiler: each chunk is read to where it goes, and folded there."""
    lanes: list[bytes] = []
    for at in range(0, size, CHUNK_BYTES):
        length = min(CHUNK_BYTES, size - at)
        into = (ctypes.c_uint8 * length).from_address(target + at)
        try:
            got = os.preadv(file, [into], start + at, os.RWF_NOWAIT)
        except BlockingIOError:
            got = 0
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        if got != length:
            return at, lanes
        lanes.append(fold_bytes(into))
    return size, lanes


def fold_bytes(chunk: Any) -> bytes:
    """The same for any buffer, by numpy."""
    data = np.frombuffer(chunk, dtype=np.uint8)
    rows = -(-len(data) // _ROW_BYTES)
    if len(data) % _ROW_BYTES:
        data = np.concatenate([data, np.zeros(rows * _ROW_BYTES - len(data), dtype=np.uint8)])
    words = data.view(np.uint64).reshape(rows, LANES)
    lanes = np.einsum("ij,i->j", words, _powers()[-rows:] if rows else _powers()[:0])
    return bytes(lanes.astype("<u8").tobytes())


def digest_of(place: TensorPlace, lanes: Iterable[bytes]) -> str:
    """A tensor's value hash out of its chunks' lanes."""
    digest = hashlib.blake2b(digest_size=16)
    size = place.end - place.start
    digest.update(f"{place.dtype} {list(place.shape)} {size}\n".encode())
    for chunk in lanes:
        digest.update(chunk)
    return digest.hexdigest()


def read_values(folder: Path) -> dict[str, str] | None:
    """Tensor → value hash as the folder's record says; None when it does not say.

    Raises:
        ModelFolderError: the record cannot be read.
    """
    file = folder / RECORD_FILE
    if not file.exists():
        return None
    values = read_json_object(file).get(RECORD_KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ModelFolderError(f"has no table {RECORD_KEY!r}", where=str(file))
    return {str(name): str(value) for name, value in values.items()}


@cache
def _powers() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The factor of each row of a whole chunk; shorter ones take the last."""
    powers, value = [], 1
    for _ in range(CHUNK_BYTES // _ROW_BYTES):
        powers.append(value)
        value = value * _FACTOR % (1 << 64)
    return np.array(powers[::-1], dtype=np.uint64)


@cache
def _kernels() -> ctypes.CDLL | None:
    try:
        library = load_fold()
    except UnsupportedError:
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.fold.argtypes = [address, address, size, address]
    library.fold.restype = None
    whole = ctypes.c_long
    library.carry.argtypes = [ctypes.c_int, whole, size, address, size, size, address, address]
    library.carry.restype = whole
    return library
