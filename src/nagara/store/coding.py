"""How content lies in a tier that is not trusted or behind a slow link: compressed, encrypted.

Content is cut into *frames* of 1 MiB, so that a range of it stays a range of what is stored:

    [table] frame frame ...

    frame   one byte (0: as it is, 1: zstd), then the bytes; with a key: nonce, AES-256-GCM of that
    table   only with compression and more than one frame: the stored length of each, 4 bytes;
            stored like a frame, uncompressed

A sealed frame is bound to its key in the tier, its place and the number of frames: what is
exchanged, moved or cut does not open. Keys in the tier stay readable: who has a file can find out
that the tenant has it too. Pure; the libraries (extra `coded`) are imported when used.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nagara.base.errors import UsageError
from nagara.store.errors import CorruptError

FRAME_BYTES = 1 << 20
KEY_BYTES = 32
TABLE = 0xFFFFFFFF  # stands for the table where a frame's place is asked for
_NONCE_BYTES, _TAG_BYTES, _MARK_BYTES = 12, 16, 1
_PLAIN, _ZSTD = b"\0", b"\1"
_PLACE = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class FramePlace:
    """Where a frame lies in what is stored."""

    index: int
    offset: int
    stored_bytes: int
    plain_bytes: int


class Coding:
    """One tenant's way of coding in one tier.

    Args:
        level: of zstd; None does not compress.
        key: of AES-256-GCM; None does not encrypt.

    Raises:
        UsageError: the library it needs is not installed.
    """

    def __init__(self, *, level: int | None = None, key: bytes | None = None) -> None:
        self.is_compressing = level is not None
        self._level = level
        self._cipher = None if key is None else _cipher(key)
        if level is not None:
            _zstandard()
        sealed = 0 if key is None else _NONCE_BYTES + _TAG_BYTES
        self._extra_bytes = sealed + _MARK_BYTES

    def frame_count(self, size_bytes: int) -> int:
        return max(1, -(-size_bytes // FRAME_BYTES))

    def has_table(self, size_bytes: int) -> bool:
        """Without compression, or with a single frame, places follow from the size."""
        return self.is_compressing and self.frame_count(size_bytes) > 1

    def table_bytes(self, size_bytes: int) -> int:
        """Stored length of the table."""
        return 4 * self.frame_count(size_bytes) + self._extra_bytes

    def most_bytes(self, plain_bytes: int) -> int:
        """A frame of that content is stored in no more than this."""
        return plain_bytes + self._extra_bytes

    def encode(self, key: str, index: int, count: int, content: bytes) -> bytes:
        """One frame, or the table (`index` = TABLE)."""
        packed = _PLAIN + content
        if self._level is not None and index != TABLE:
            smaller = _zstandard().ZstdCompressor(level=self._level).compress(content)
            if len(smaller) < len(content):
                packed = _ZSTD + smaller
        if self._cipher is None:
            return packed
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + bytes(self._cipher.encrypt(nonce, packed, _bound(key, index, count)))

    def decode(
        self, key: str, index: int, count: int, stored: bytes, limit_bytes: int, *, exact: bool
    ) -> bytes:
        """The inverse; `limit_bytes` is how long the content is (`exact`) or may be.

        Raises `CorruptError` for anything that `encode` did not make for this place.
        """
        packed = self._opened(key, index, count, stored)
        mark, body = packed[:_MARK_BYTES], packed[_MARK_BYTES:]
        if mark == _ZSTD:
            body = _decompressed(body, limit_bytes, key)
        elif mark != _PLAIN:
            raise CorruptError("is not coded as this tier's settings say", where=key)
        if len(body) > limit_bytes or (exact and len(body) != limit_bytes):
            raise CorruptError("a frame has another length than its place", where=key)
        return body

    def places(self, size_bytes: int, table: bytes | None = None) -> list[FramePlace]:
        """Where the frames of content of that size lie. `table` is decoded."""
        count = self.frame_count(size_bytes)
        plain = [min(FRAME_BYTES, size_bytes - at * FRAME_BYTES) for at in range(count)]
        stored = [self.most_bytes(length) for length in plain]
        start = 0
        if table is not None:
            stored = list(struct.unpack(f">{count}I", table))
            start = self.table_bytes(size_bytes)
        offsets = accumulate(stored, initial=start)
        return [
            FramePlace(*place) for place in zip(range(count), offsets, stored, plain, strict=False)
        ]

    def _opened(self, key: str, index: int, count: int, stored: bytes) -> bytes:
        if self._cipher is None:
            return stored
        from cryptography.exceptions import InvalidTag

        nonce, sealed = stored[:_NONCE_BYTES], stored[_NONCE_BYTES:]
        try:
            return bytes(self._cipher.decrypt(nonce, sealed, _bound(key, index, count)))
        except (InvalidTag, ValueError):
            raise CorruptError("does not open with the tenant's key", where=key) from None


def pack_table(lengths: list[int]) -> bytes:
    """The table's content."""
    return struct.pack(f">{len(lengths)}I", *lengths)


def cut(content: memoryview) -> Iterator[bytes]:
    """Content as that of frames; empty content is one empty frame."""
    for start in range(0, max(1, len(content)), FRAME_BYTES):
        yield bytes(content[start : start + FRAME_BYTES])


def _bound(key: str, index: int, count: int) -> bytes:
    return key.encode() + b"\0" + _PLACE.pack(index, count)


def _decompressed(body: bytes, limit_bytes: int, key: str) -> bytes:
    zstandard = _zstandard()
    try:
        # The size is the sender's word: believed only after it was compared.
        if not 0 <= zstandard.frame_content_size(body) <= limit_bytes:
            raise CorruptError("a frame is larger than its place", where=key)
        return bytes(zstandard.ZstdDecompressor().decompress(body))
    except zstandard.ZstdError as error:
        raise CorruptError(f"is no zstd frame: {error}", where=key) from error


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UsageError(
            "an encrypted tier needs the library cryptography", hint="pip install 'nagara[coded]'"
        ) from None
    return AESGCM(key)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            "a compressed tier needs the library zstandard", hint="pip install 'nagara[coded]'"
        ) from None
    return zstandard
