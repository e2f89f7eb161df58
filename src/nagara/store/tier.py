"""What every remote place of objects can do, and a folder as the simplest one.

Keys are the same everywhere, below one tenant's root: `sha256/NAME`, `chunks/NAME`,
`roots/KIND/NAME`. A tier moves bytes and says honestly why it could not; it does not know whether
they are right: who asked verifies. Called from any thread.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from nagara.store.errors import AbsentError, BadNameError, UnavailableError
from nagara.store.local import full_disk_named
from nagara.store.statistics import TierStatistics

_KEY = re.compile(
    r"(sha256|chunks|roots)(/[A-Za-z0-9_@%+=~-][A-Za-z0-9._@%+=~-]{0,199}){1,3}", re.ASCII
)


def check_key(key: str) -> None:
    """Raises `BadNameError` for a key that could mean something else than a place in a tier."""
    if not _KEY.fullmatch(key):
        raise BadNameError(f"{key[:200]!r} is not a key")


class Entry(NamedTuple):
    """One thing a tier has."""

    key: str
    size_bytes: int
    changed_s: float  # seconds since the epoch


class Tier(Protocol):
    """A place of one tenant's objects that is farther away than the local folder."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def can_write(self) -> bool:
        """What was fetched from farther away may be kept here."""
        ...

    @property
    def statistics(self) -> TierStatistics: ...

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        """Exactly `length` bytes from `start`, or an error: never fewer, never others' faults.

        Args:
            deadline_s: monotonic seconds after which nobody waits any more.

        Raises:
            AbsentError: the tier answered that there is no such key.
            UnavailableError: everything else, retries included.
        """
        ...

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        """As `read`, into memory of the caller; what is in there after an error is nothing."""
        ...

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        """A whole small document; one over the limit is an `UnavailableError`."""
        ...

    def has(self, key: str, deadline_s: float) -> bool:
        """Raises `UnavailableError` when that cannot be found out."""
        ...

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        """Puts it there, visible only when complete. Raises `UnavailableError`, `FullError`."""
        ...

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        """What is there below a folder of keys. Raises `UnavailableError` where unsupported."""
        ...

    def delete(self, key: str, deadline_s: float) -> None:
        """Removes it if it is there."""
        ...

    def close(self) -> None:
        """Gives up connections."""
        ...


class FolderTier:
    """A folder as a far tier: a network file system, or a disk that travels."""

    can_write = True

    def __init__(self, root: Path, tenant: str, name: str = "folder") -> None:
        self.name = name
        self.statistics = TierStatistics(name)
        self._root = root / tenant

    def read(self, key: str, start: int, length: int, deadline_s: float) -> bytes:
        data = bytearray(length)
        self.read_into(key, start, memoryview(data), deadline_s)
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview, deadline_s: float) -> None:
        begun_s = time.monotonic()
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                got = os.preadv(file.fileno(), [buffer], start)
        except FileNotFoundError:
            self._require_root()
            self.statistics.miss(time.monotonic() - begun_s)
            raise self._absent(key) from None
        except OSError as error:
            self.statistics.fault()
            raise UnavailableError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if got != len(buffer):
            self.statistics.fault()
            raise UnavailableError("the file ends early", where=str(path))
        self.statistics.hit(got, time.monotonic() - begun_s)

    def read_all(self, key: str, limit_bytes: int, deadline_s: float) -> bytes:
        try:
            size = self._path(key).stat().st_size
        except OSError:
            self._require_root()
            raise self._absent(key) from None
        if size > limit_bytes:
            raise UnavailableError(f"{key} is larger than {limit_bytes} bytes", where=self.name)
        return self.read(key, 0, size, deadline_s)

    def has(self, key: str, deadline_s: float) -> bool:
        is_there = self._path(key).exists()
        if not is_there:
            self._require_root()
        return is_there

    def write(self, key: str, source: bytes | Path, deadline_s: float) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with full_disk_named(self._root):
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    if isinstance(source, bytes):
                        file.write(source)
                    else:
                        _copy_sparse(source, file.fileno())
                    file.flush()
                    os.fchmod(file.fileno(), 0o444)
                    os.fsync(file.fileno())
                    self.statistics.wrote(os.fstat(file.fileno()).st_size)
                Path(temporary).rename(path)
            finally:
                Path(temporary).unlink(missing_ok=True)

    def entries(self, prefix: str, deadline_s: float) -> Iterator[Entry]:
        self._require_root()
        folder = self._root / prefix
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.is_file() and not path.name.startswith("."):
                state = path.stat()
                key = path.relative_to(self._root).as_posix()
                yield Entry(key, state.st_size, state.st_mtime)

    def delete(self, key: str, deadline_s: float) -> None:
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    def _absent(self, key: str) -> AbsentError:
        return AbsentError(f"{key} is not there", where=self.name)

    def _require_root(self) -> None:
        """A folder that is not mounted is not an empty one."""
        if not self._root.parent.is_dir():
            raise UnavailableError("the folder is not there", where=str(self._root.parent))


def _copy_sparse(source: Path, target: int) -> None:
    with source.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.ftruncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            os.lseek(target, at, os.SEEK_SET)
            while at < end:
                os.lseek(file.fileno(), at, os.SEEK_SET)
                at += os.sendfile(target, file.fileno(), None, min(end - at, 1 << 26))
