"""Putting file contents into a store while a tree is made of them; many at a time.

Small ones stay in the node. Called by an importer's thread, the work is done by a pool.
"""

import errno
import hashlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from nagara.image.errors import SourceError
from nagara.image.file_memory import FileMemory
from nagara.image.tree import INLINE_LIMIT_BYTES, Node
from nagara.store.hashing import hash_file, next_data
from nagara.store.names import ObjectName
from nagara.store.sink import FileSink
from nagara.store.store import Store

_MEMORY_BYTES = 1 << 20  # up to this size a file is read at once and hashed before it is written
_COPY_BYTES = 1 << 20
_THREADS = 8
_AHEAD = 256  # files under way


class ContentWriter:
    """Use as a context manager: at its end everything that was given is in the store.

    Args:
        memory: of earlier imports; what it knows is not read again.
        keeps_files: give large files a second name in the store instead of copying them; for
            files that nobody writes to. One that is written to all the same is found out by its
            change time, as every object is.
    """

    def __init__(
        self, store: Store, memory: FileMemory | None = None, *, keeps_files: bool = False
    ) -> None:
        self.store = store
        self._keeps_files = keeps_files
        self.files = 0  # finished so far, and their bytes: for who shows progress
        self.bytes = 0
        self._memory = memory
        self.new: dict[ObjectName, int] = {}  # what was not there before, with its size
        self._pool = ThreadPoolExecutor(_THREADS, "import")
        self._pending: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._seen: set[ObjectName] = set()

    def __enter__(self) -> "ContentWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pending and kind is None:
                self._pending.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)
        if kind is None:
            self.store.local.folder.syncer.flush()

    def add_path(self, node: Node, path: bytes) -> None:
        """The content of a file of this machine; read later, by another thread."""
        while len(self._pending) >= _AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._add_path, node, path))

    def add_bytes(self, node: Node, content: bytes) -> None:
        """Content in memory."""
        node.size = len(content)
        if len(content) <= INLINE_LIMIT_BYTES:
            node.inline = content or None
            return
        name = ObjectName(hashlib.sha256(content).digest(), len(content))
        if self._is_new(name):
            with self.store.local.temporary() as temporary:
                temporary.write_bytes(content)
                self.store.add_hashed(temporary, name, None)
        node.content = name

    def add_stream(
        self,
        node: Node,
        stream: BinaryIO,
        size: int,
        extents: list[tuple[int, int]] | None = None,
    ) -> None:
        """Content that can be read once, in order; `extents` are the parts that are no holes.

        Raises `SourceError` when it ends early.
        """
        node.size = size
        if size <= _MEMORY_BYTES and extents is None:
            content = stream.read(size)
            if len(content) != size:
                raise SourceError("the file's content is cut")
            self.add_bytes(node, content)
            return
        with self.store.local.temporary() as temporary:
            with temporary.open("r+b", buffering=0) as file:
                file.truncate(size)
                sink = FileSink(file.fileno())
                for start, length in [(0, size)] if extents is None else extents:
                    if extents is not None:
                        stream.seek(start)
                    _copy(stream, sink, start, length)
                if size <= INLINE_LIMIT_BYTES:
                    node.inline = os.pread(file.fileno(), size, 0) or None
                    return
                hashed = hash_file(file.fileno(), size, self.store.local.folder.hashers)
            node.content = hashed.name
            if self._is_new(hashed.name):
                self.store.add_hashed(temporary, hashed.name, hashed.chunk_list)

    def _add_path(self, node: Node, path: bytes) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(
                f"cannot be read: {error.strerror}", where=os.fsdecode(path)
            ) from None
        try:
            before = os.fstat(descriptor)
            if self._is_remembered(node, before):
                return
            if before.st_size <= _MEMORY_BYTES:
                content = os.pread(descriptor, before.st_size + 1, 0)
                if len(content) != before.st_size:
                    raise SourceError("changed while it was read", where=os.fsdecode(path))
                self.add_bytes(node, content)
            else:
                self._add_large(node, path, descriptor, before.st_size)
            after = os.fstat(descriptor)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise SourceError("changed while it was read", where=os.fsdecode(path))
            if self._memory is not None and node.content is not None:
                self._memory.note(after, node.content)
        finally:
            os.close(descriptor)
            with self._lock:
                self.files += 1
                self.bytes += node.size

    def _is_remembered(self, node: Node, state: os.stat_result) -> bool:
        """Takes the content that an earlier import read, if it still is in the store."""
        name = self._memory.find(state) if self._memory is not None else None
        if name is None or name.size != state.st_size or not self.store.local.has(name):
            return False
        self.store.local.folder.ledger.use(self.store.local.tenant, str(name))
        node.size, node.content = name.size, name
        return True

    def _add_large(self, node: Node, path: bytes, descriptor: int, size: int) -> None:
        """Hashed first: what is there already need not be written."""
        node.size = size
        before = os.fstat(descriptor)
        hashed = hash_file(descriptor, size, self.store.local.folder.hashers)
        node.content = hashed.name
        if not self._is_new(hashed.name):
            return
        with self.store.local.temporary() as temporary:
            if self._keeps_files and _link(path, temporary, before):
                self.store.add_hashed(temporary, hashed.name, hashed.chunk_list)
                return
            with temporary.open("r+b", buffering=0) as file:
                _copy_sparse(descriptor, file.fileno(), size)
                # What was copied, not what was hashed: the file may have changed in between.
                again = hash_file(file.fileno(), size, self.store.local.folder.hashers)
            if again.name != hashed.name:
                raise SourceError("changed while it was read")
            self.store.add_hashed(temporary, hashed.name, hashed.chunk_list)

    def _is_new(self, name: ObjectName) -> bool:
        """Nobody has it and nobody is about to bring it."""
        with self._lock:
            if name in self._seen:
                return False
            self._seen.add(name)
        if self.store.local.has(name):
            self.store.local.folder.ledger.use(self.store.local.tenant, str(name))
            return False
        with self._lock:
            self.new[name] = name.size
        return True


def _link(path: bytes, target: Path, before: os.stat_result) -> bool:
    """A second name for the file that was hashed, if nobody has written to it since."""
    second = target.with_name(target.name + ".link")
    try:
        os.link(path, second, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        return False
    now = second.stat()
    if (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == (
        before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns,
    ):  # fmt: skip
        second.replace(target)
        return True
    second.unlink()
    return False


def _copy(stream: BinaryIO, sink: FileSink, at: int, length: int) -> None:
    end = at + length
    while at < end:
        piece = stream.read(min(end - at, _COPY_BYTES))
        if not piece:
            raise SourceError("the file's content is cut")
        if piece.count(0) != len(piece):
            sink.write(at, piece)
        at += len(piece)


def _copy_sparse(source: int, target: int, size: int) -> None:
    os.ftruncate(target, size)
    at = next_data(source, 0, size)
    while at < size:
        try:
            end = os.lseek(source, at, os.SEEK_HOLE)
        except OSError:
            end = size
        while at < end:
            copied = _copy_range(source, target, min(end - at, 1 << 26), at)
            if copied == 0:
                raise SourceError("changed while it was read")
            at += copied
        at = next_data(source, at, size)


def _copy_range(source: int, target: int, length: int, at: int) -> int:
    """Shares blocks where the file system can; copies where it cannot, or between two of them."""
    try:
        return os.copy_file_range(source, target, length, at, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    data = os.pread(source, min(length, _COPY_BYTES), at)
    return os.pwrite(target, data, at) if data else 0
