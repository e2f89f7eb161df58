"""A tier in memory whose every answer a test decides: for races and faults."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.statistics import TierStatistics
from nagara.store.tier import Entry, check_key

Interfere = Callable[[str, int, bytes], bytes]  # key, number of this request, right answer


class ScriptedTier:
    """Keys and contents in a dictionary.

    Args:
        interfere: sees each answer to `read` before it is given: may change it, wait, or raise.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        interfere: Interfere | None = None,
        can_write: bool = True,
    ) -> None:
        self.name = name
        self.can_write = can_write
        self.statistics = TierStatistics(name)
        self.content: dict[str, bytes] = {}
        self.reads: list[tuple[str, int, int]] = []
        self.interfere = interfere

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        check_key(key)
        self.reads.append((key, start, length))
        number = len(self.reads)
        if key not in self.content:
            self.statistics.miss(0.0)
            raise AbsentError(f"{key} is not there", where=self.name)
        data = self.content[key][start : start + length]
        if len(data) != length:
            raise UnavailableError("it ends early", where=self.name)
        if self.interfere is not None:
            data = self.interfere(key, number, data)
        self.statistics.hit(len(data), 0.0)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        data = self.read(key, start, len(buffer), deadline_s)
        if len(data) != len(buffer):  # `interfere` changed more than bytes
            raise UnavailableError(f"answered with {len(data)} bytes", where=self.name)
        buffer[:] = data

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        size = len(self.content.get(key, b""))
        if size > limit_bytes:
            raise UnavailableError(f"{key} is larger than {limit_bytes} bytes", where=self.name)
        return self.read(key, 0, size, deadline_s)

    def has(self, key: str, deadline_s: float) -> bool:
        check_key(key)
        return key in self.content

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        check_key(key)
        self.content[key] = source if isinstance(source, bytes) else source.read_bytes()
        self.statistics.wrote(len(self.content[key]))

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        for key in sorted(self.content):
            if key.startswith(prefix + "/"):
                yield Entry(key, len(self.content[key]), time.time())

    def delete(self, key: str, deadline_s: float) -> None:
        self.content.pop(key, None)

    def close(self) -> None:
        """Nothing is held."""
