"""Any tier with its content coded on the way there and back: compressed, encrypted (see `coding`).

Called from any thread.
"""

import base64
import binascii
import stat
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from nagara.base.errors import UsageError
from nagara.store.coding import (
    FRAME_BYTES,
    KEY_BYTES,
    TABLE,
    Coding,
    FramePlace,
    cut,
    pack_table,
)
from nagara.store.errors import CorruptError, UnavailableError
from nagara.store.local import full_disk_named
from nagara.store.names import list_bytes, parse_name
from nagara.store.statistics import TierStatistics
from nagara.store.tier import Entry, Tier, check_key

_TABLES_KEPT = 256


class CodedTier:
    """A tier in front of another one.

    Args:
        scratch: where large content is coded before it is sent.
    """

    def __init__(self, inner: Tier, coding: Coding, scratch: Path) -> None:
        self._inner = inner
        self._coding = coding
        self._scratch = scratch
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, list[FramePlace]] = OrderedDict()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def can_write(self) -> bool:
        return self._inner.can_write

    @property
    def statistics(self) -> TierStatistics:
        """Of what goes over the link."""
        return self._inner.statistics

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        size = _plain_bytes(key)
        if size is None or self._coding.frame_count(size) == 1:
            content = self.read_all(key, FRAME_BYTES if size is None else size, deadline_s)
            if len(content) < start + length:
                raise UnavailableError(f"{key} ends early", where=self.name)
            return content[start : start + length]
        if start + length > size:
            raise UnavailableError(f"{key} ends early", where=self.name)
        if not length:
            return b""
        places = self._places(key, size, deadline_s)
        places = places[start // FRAME_BYTES : -(-(start + length) // FRAME_BYTES)]
        first, last = places[0], places[-1]
        stored = self._inner.read(
            key, first.offset, last.offset + last.stored_bytes - first.offset, deadline_s
        )
        try:
            content = self._decoded(key, size, places, stored)
        except CorruptError:
            with self._lock:  # it may have been written anew since its table was read
                self._tables.pop(key, None)
            raise
        skipped = start - first.index * FRAME_BYTES
        return content[skipped : skipped + length]

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        buffer[:] = self.read(key, start, len(buffer), deadline_s)

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        size = _plain_bytes(key)
        if size is not None and size > limit_bytes:
            raise UnavailableError(f"{key} is larger than {limit_bytes} bytes", where=self.name)
        if size is not None and self._coding.frame_count(size) > 1:
            return self.read(key, 0, size, deadline_s)
        limit = limit_bytes if size is None else size
        stored = self._inner.read_all(key, self._coding.most_bytes(limit), deadline_s)
        return self._coding.decode(key, 0, 1, stored, limit, exact=size is not None)

    def has(self, key: str, deadline_s: float) -> bool:
        return self._inner.has(key, deadline_s)

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        check_key(key)
        if isinstance(source, bytes) and (_plain_bytes(key) is None or len(source) <= FRAME_BYTES):
            self._inner.write(key, self._coding.encode(key, 0, 1, source), deadline_s)
            return
        with (
            full_disk_named(self._scratch),
            tempfile.NamedTemporaryFile(dir=self._scratch, prefix=".coded-") as file,
        ):
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            count = self._coding.frame_count(size)
            has_table = self._coding.has_table(size)
            if has_table:
                file.write(bytes(self._coding.table_bytes(size)))
            lengths = [
                file.write(self._coding.encode(key, index, count, content))
                for index, content in enumerate(_frames(source))
            ]
            if has_table:
                file.seek(0)
                file.write(self._coding.encode(key, TABLE, count, pack_table(lengths)))
            file.flush()
            self._inner.write(key, Path(file.name), deadline_s)

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        """Sizes are those of what is stored."""
        return self._inner.entries(prefix, deadline_s)

    def delete(self, key: str, deadline_s: float) -> None:
        self._inner.delete(key, deadline_s)

    def close(self) -> None:
        self._inner.close()

    def _places(self, key: str, size: int, deadline_s: float) -> list[FramePlace]:
        if not self._coding.has_table(size):
            return self._coding.places(size)
        with self._lock:
            if (known := self._tables.get(key)) is not None:
                self._tables.move_to_end(key)
                return known
        count = self._coding.frame_count(size)
        stored = self._inner.read(key, 0, self._coding.table_bytes(size), deadline_s)
        table = self._coding.decode(key, TABLE, count, stored, 4 * count, exact=True)
        places = self._coding.places(size, table)
        if any(place.stored_bytes > self._coding.most_bytes(FRAME_BYTES) for place in places):
            raise UnavailableError(f"{key} has frames that are too large", where=self.name)
        with self._lock:
            self._tables[key] = places
            while len(self._tables) > _TABLES_KEPT:
                self._tables.popitem(last=False)
        return places

    def _decoded(self, key: str, size: int, places: list[FramePlace], stored: bytes) -> bytes:
        count, start = self._coding.frame_count(size), places[0].offset
        return b"".join(
            self._coding.decode(
                key,
                place.index,
                count,
                stored[place.offset - start : place.offset - start + place.stored_bytes],
                place.plain_bytes,
                exact=True,
            )
            for place in places
        )


def read_tenant_key(folder: Path, tenant: str) -> bytes:
    """The key in FOLDER/TENANT.key: 32 bytes in base64, for its owner only.

    Raises `UsageError` that says what is wrong with it.
    """
    path = folder / f"{tenant}.key"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UsageError("others may read the key", where=str(path), hint="chmod 600 it")
        key = base64.b64decode(path.read_bytes().strip(), validate=True)
    except (OSError, binascii.Error) as error:
        raise UsageError(
            f"the tenant's key cannot be read: {error}",
            where=str(path),
            hint="head -c 32 /dev/urandom | base64",
        ) from error
    if len(key) != KEY_BYTES:
        raise UsageError(f"has {len(key)} bytes, not {KEY_BYTES}", where=str(path))
    return key


def _frames(source: bytes | Path) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from cut(memoryview(source))
        return
    with source.open("rb") as file:
        content = file.read(FRAME_BYTES)
        yield content
        while content := file.read(FRAME_BYTES):
            yield content


def _plain_bytes(key: str) -> int | None:
    """How long the content is, where its key says so."""
    kind, _, rest = key.partition("/")
    if kind == "sha256":
        return parse_name(rest).size
    return list_bytes(parse_name(rest)) if kind == "chunks" else None
