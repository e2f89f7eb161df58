"""Reading one object at any place, wherever its bytes are at the moment. Called from any thread."""

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from nagara.store.chunked import Assembly
from nagara.store.errors import CorruptError, FullError
from nagara.store.passing import PassingBy
from nagara.store.proving import ChunkProof


class Reader(Protocol):
    """An opened object. All bytes it gives were verified."""

    def is_here(self, start: int, length: int) -> bool:
        """A read of those bytes waits for no network."""
        ...

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        """Makes those bytes ready for a reader who comes later: fetched, verified.

        `is_cached`: the object's file will be read, and not through this reader: what is fetched
        goes through the kernel's cache.

        Raises `StoreError` when that cannot be; the reader may have other means.
        """
        ...

    def read_into(self, buffer: memoryview, start: int, deadline_s: float) -> None:
        """Fills the whole buffer from `start`, or raises a `StoreError`; never less."""
        ...

    def forget_cache(self, start: int, length: int) -> None:
        """The kernel need not keep these bytes for us: somebody else caches them."""
        ...

    def is_outdated(self) -> bool:
        """Opening it again may give a better one: the object was completed or found room."""
        ...

    def close(self) -> None: ...


class FileReader:
    """A whole object of the local folder. Eviction does not disturb it.

    Owns the descriptor, and closes it when nobody has the reader any more: so a shared one is
    never closed under a running read.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closer = weakref.finalize(self, os.close, descriptor)

    def is_outdated(self) -> bool:
        return False

    def is_here(self, start: int, length: int) -> bool:
        return True

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        """All of it is ready."""

    def read_into(self, buffer: memoryview, start: int, deadline_s: float) -> None:
        _fill(self.descriptor, buffer, start)

    def forget_cache(self, start: int, length: int) -> None:
        os.posix_fadvise(self.descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """At once; only for who is alone with it."""
        self._closer()


class AssemblyReader:
    """A large object that is not complete. The assembly belongs to the store."""

    def __init__(self, assembly: Assembly, passing: PassingBy) -> None:
        self._assembly = assembly
        self._passing = passing  # for the chunks that find no room

    def is_here(self, start: int, length: int) -> bool:
        return self._assembly.has(start, length)

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        self._assembly.need(start, length, deadline_s, is_cached=is_cached)

    def read_into(self, buffer: memoryview, start: int, deadline_s: float) -> None:
        try:
            self._assembly.need(start, len(buffer), deadline_s)
        except FullError:
            self._passing.fill(self._assembly.name, buffer, start, deadline_s)
        else:
            self._assembly.file.read_into(buffer, start)

    def forget_cache(self, start: int, length: int) -> None:
        self._assembly.file.forget_cache(start, length)

    def is_outdated(self) -> bool:
        return self._assembly.is_object

    def close(self) -> None:
        """The store closes the assembly."""


class ProvingReader:
    """A large object that is here and is checked as it is read. The proof belongs to the store.

    Args:
        instead: opens what takes its place when a chunk turned out to be wrong.
    """

    def __init__(self, proof: ChunkProof, instead: Callable[[float], Reader]) -> None:
        self._proof = proof
        self._instead = instead

    def is_here(self, start: int, length: int) -> bool:
        return self._proof.has(start, length)

    def need(self, start: int, length: int, deadline_s: float, *, is_cached: bool = False) -> None:
        self._proof.need(start, length, deadline_s)

    def read_into(self, buffer: memoryview, start: int, deadline_s: float) -> None:
        try:
            self._proof.need(start, len(buffer), deadline_s)
        except CorruptError:
            self._instead(deadline_s).read_into(buffer, start, deadline_s)
        else:
            _fill(self._proof.descriptor, buffer, start)

    def forget_cache(self, start: int, length: int) -> None:
        os.posix_fadvise(self._proof.descriptor, start, length, os.POSIX_FADV_DONTNEED)

    def is_outdated(self) -> bool:
        return self._proof.is_wrong

    def close(self) -> None:
        """The store closes the proof."""


def _fill(descriptor: int, buffer: memoryview, start: int) -> None:
    while buffer:
        got = os.preadv(descriptor, [buffer], start)
        if got == 0:
            raise OSError(5, "the file ends early")
        buffer, start = buffer[got:], start + got
