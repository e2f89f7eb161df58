"""Names of objects and how content gets one. Pure but for hashing.

A name is `<base32 of 32 bytes, lower case>.<size in bytes>`; the algorithm's tag is the folder
it lies in (`sha256/`). What was hashed follows from the size alone:

- up to 64 MiB: the content;
- above: the *chunk list*, i.e. the sha256 of each 4 MiB chunk (the last may be shorter) one after
  another, behind a line that separates it from any content. So the list proves itself by the
  name, every chunk by the list, and a large object can be checked in pieces and by several
  threads.

Called from any thread.
"""

import array
import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from nagara.store.errors import BadNameError

TAG = "sha256"
CHUNK_BYTES = 4 << 20
WHOLE_LIMIT_BYTES = 64 << 20
DIGEST_BYTES = 32
_SIZE_LIMIT = 1 << 63
_LIST_HEADER = b"nagara chunk list 1: sha256 of 4194304 bytes each\n"
# Base32 by pairs of characters: names are written and read by the hundred thousand.
_SPARE_BITS = 4
_SHIFTS = tuple(range(250, -1, -10))
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_DIGITS = str.maketrans(_ALPHABET, "0123456789abcdefghijklmnopqrstuv")
_NAME = re.compile(r"([a-z2-7]{52})\.(0|[1-9][0-9]{0,18})", re.ASCII)


class ObjectName(NamedTuple):
    """What an object is called: equal names, equal bytes."""

    digest: bytes
    size: int

    def __str__(self) -> str:
        return _text(self)

    @property
    def is_chunked(self) -> bool:
        """The digest is that of the chunk list."""
        return self.size > WHOLE_LIMIT_BYTES

    @property
    def chunk_count(self) -> int:
        return -(-self.size // CHUNK_BYTES)

    @property
    def key(self) -> str:
        """Where the content lies below a tenant's root, in every tier."""
        return f"{TAG}/{self}"

    @property
    def list_key(self) -> str:
        """Where the chunk list lies."""
        return f"chunks/{self}"


@functools.lru_cache(maxsize=1 << 14)
def _text(name: ObjectName) -> str:
    number = int.from_bytes(name.digest, "big") << _SPARE_BITS
    return "".join([_PAIRS[number >> at & 1023] for at in _SHIFTS]) + f".{name.size}"


def parse_name(text: str) -> ObjectName:
    """The inverse of `str(name)`. Raises `BadNameError` for anything else."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise BadNameError(f"{text[:80]!r} is not an object's name")
    number = int(match[1].translate(_DIGITS), 32)
    # Base32 has four spare bits at the end: only one spelling of a name is a name.
    if number & (1 << _SPARE_BITS) - 1:
        raise BadNameError(f"{text!r} is not an object's name")
    name = ObjectName((number >> _SPARE_BITS).to_bytes(DIGEST_BYTES, "big"), int(match[2]))
    if name.size >= _SIZE_LIMIT:
        raise BadNameError(f"{text!r} is not an object's name")
    return name


def name_bytes(content: bytes | memoryview) -> ObjectName:
    """The name of content in memory, however large."""
    if len(content) <= WHOLE_LIMIT_BYTES:
        return ObjectName(hashlib.sha256(content).digest(), len(content))
    view = memoryview(content)
    hashes = [
        hashlib.sha256(view[start : start + CHUNK_BYTES]).digest()
        for start in range(0, len(view), CHUNK_BYTES)
    ]
    return ChunkList(hashes, len(content)).name


class ChunkList:
    """The hashes of a large object's chunks."""

    def __init__(self, hashes: list[bytes], size: int) -> None:
        self.hashes = hashes
        self.size = size

    @property
    def name(self) -> ObjectName:
        return ObjectName(hashlib.sha256(self.to_bytes()).digest(), self.size)

    def to_bytes(self) -> bytes:
        """The stored form: header, size, hashes."""
        return _LIST_HEADER + self.size.to_bytes(8, "big") + b"".join(self.hashes)

    def length(self, index: int) -> int:
        """Bytes in chunk `index`."""
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)

    def is_hole(self, index: int) -> bool:
        """The chunk consists of zeros: it is neither stored nor moved."""
        return self.hashes[index] == zero_hash(self.length(index))


def covering(start: int, length: int) -> range:
    """Which chunks those bytes of a large object lie in."""
    return range(start // CHUNK_BYTES, -(-(start + length) // CHUNK_BYTES))


def list_bytes(name: ObjectName) -> int:
    """How long the chunk list of `name` is."""
    return len(_LIST_HEADER) + 8 + DIGEST_BYTES * name.chunk_count


def parse_chunk_list(raw: bytes, name: ObjectName) -> ChunkList:
    """The list of a chunked object. Raises `BadNameError` unless it is the one of that name."""
    if len(raw) != list_bytes(name) or hashlib.sha256(raw).digest() != name.digest:
        raise BadNameError("the chunk list is not the one of this object", where=str(name))
    start = len(_LIST_HEADER) + 8
    hashes = [raw[at : at + DIGEST_BYTES] for at in range(start, len(raw), DIGEST_BYTES)]
    return ChunkList(hashes, name.size)


@functools.lru_cache(maxsize=64)
def zero_hash(length: int) -> bytes:
    """sha256 of `length` zero bytes."""
    return hashlib.sha256(bytes(length)).digest()


def pack_names(names: list[ObjectName]) -> bytes:
    """A reference list: 40 bytes a name, sorted, without duplicates."""
    return b"".join(n.digest + n.size.to_bytes(8, "big") for n in sorted(set(names)))


def unpack_names(raw: bytes) -> Iterator[ObjectName]:
    """The names in a reference list. Raises `BadNameError`."""
    if len(raw) % 40:
        raise BadNameError("a reference list has a length that is no multiple of 40")
    for at in range(0, len(raw), 40):
        yield ObjectName(raw[at : at + 32], int.from_bytes(raw[at + 32 : at + 40], "big"))


def large_names(raw: bytes) -> list[ObjectName]:
    """The names of large objects in a reference list, without looking at the others one by one."""
    words = array.array("Q", raw[: len(raw) // 8 * 8])
    if sys.byteorder == "little":
        words.byteswap()
    sizes = words[4::5]
    if not sizes or max(sizes) <= WHOLE_LIMIT_BYTES:
        return []
    large = [index for index, size in enumerate(sizes) if size > WHOLE_LIMIT_BYTES]
    return [ObjectName(raw[40 * at : 40 * at + 32], sizes[at]) for at in large]
