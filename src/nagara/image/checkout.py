"""An image as plain files: for machines without FUSE or without root.

Eager and in parallel; blocks are shared with the object folder where the file system can
(reflink), copied where it cannot. Never hard links: a write in a replica would change the object
for everybody. Without root, owners, devices and some attributes cannot be made: what was left out
is returned and named, not passed over in silence. Blocking.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nagara.image.tree import Node, printable, walk
from nagara.store.local import full_disk_named
from nagara.store.reader import FileReader
from nagara.store.sink import FileSink
from nagara.store.store import Store

_FICLONE = 0x40049409  # linux/fs.h
_THREADS = 16
_COPY_BYTES = 1 << 20
_REFUSED = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class CheckedOut:
    """What was made, and what this user or file system could not be given."""

    files: int
    left_out: tuple[str, ...]


def check_out(store: Store, tree: Node, target: Path) -> CheckedOut:
    """Makes the tree below `target`, which must be an empty folder or not exist.

    Raises `StoreError` (`FullError` from a full disk), OSError.
    """
    with full_disk_named(target):
        return _Checkout(store, target).run(tree)


class _Checkout:
    def __init__(self, store: Store, target: Path) -> None:
        self._store = store
        self._root = os.fsencode(target.absolute())
        self._left_out: dict[str, None] = {}
        self._first: dict[int, bytes] = {}  # files with several names, by node

    def run(self, tree: Node) -> CheckedOut:
        target = os.fsdecode(self._root)
        Path(target).mkdir(parents=True, exist_ok=True)
        if any(Path(target).iterdir()):
            raise FileExistsError(errno.ENOTEMPTY, "is not empty", target)
        entries = list(walk(tree))
        files = [(path, node) for path, node in entries if stat.S_ISREG(node.mode)]
        later = []
        made = []
        with ThreadPoolExecutor(_THREADS, "checkout") as pool:
            for path, node in entries:
                if node.is_folder and path:
                    os.mkdir(self._place(path), 0o700)  # noqa: PTH102 - bytes
                elif stat.S_ISREG(node.mode):
                    if id(node) in self._first:
                        later.append((path, node))
                    else:
                        self._first[id(node)] = path
                        made.append(pool.submit(self._file, path, node))
                elif not node.is_folder:
                    self._special(path, node)
        for each in made:
            each.result()
        for path, node in later:
            os.link(self._place(self._first[id(node)]), self._place(path), follow_symlinks=False)
        for path, node in reversed(entries):  # folders last: what is in them changes their times
            if node.is_folder or not stat.S_ISREG(node.mode):
                self._adorn(path, node)
        return CheckedOut(len(files), tuple(self._left_out))

    def _file(self, path: bytes, node: Node) -> None:
        target = self._place(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(target, flags, 0o600)
        try:
            if node.inline is not None:
                FileSink(descriptor).write(0, node.inline)
            elif node.content is not None:
                self._fill(descriptor, node)
        finally:
            os.close(descriptor)
        self._adorn(path, node)

    def _fill(self, descriptor: int, node: Node) -> None:
        assert node.content is not None
        self._store.ensure(node.content)
        reader = self._store.open(node.content)
        try:
            if isinstance(reader, FileReader) and clone(descriptor, reader.descriptor):
                return
            os.ftruncate(descriptor, node.size)
            sink = FileSink(descriptor)
            buffer = memoryview(bytearray(_COPY_BYTES))
            for start in range(0, node.size, _COPY_BYTES):
                piece = buffer[: min(_COPY_BYTES, node.size - start)]
                reader.read_into(piece, start, self._store.deadline(None))
                if bytes(piece).count(0) != len(piece):
                    sink.write(start, piece)
        finally:
            reader.close()

    def _special(self, path: bytes, node: Node) -> None:
        target = self._place(path)
        if node.target is not None:
            os.symlink(node.target, target)  # noqa: PTH211 - bytes
            return
        with self._allowed(path, "a special file"):
            os.mknod(target, node.mode, node.rdev)

    def _adorn(self, path: bytes, node: Node) -> None:
        target = self._place(path)
        if not os.path.lexists(target):
            return
        with self._allowed(path, f"its owner {node.uid}:{node.gid}"):
            state = os.lstat(target)
            if (state.st_uid, state.st_gid) != (node.uid, node.gid):
                os.chown(target, node.uid, node.gid, follow_symlinks=False)
        for name, value in node.xattrs:
            with self._allowed(path, f"the attribute {printable(name)}"):
                os.setxattr(target, name, value, follow_symlinks=False)
        if node.target is None:
            os.chmod(target, stat.S_IMODE(node.mode))  # noqa: PTH101 - bytes
        os.utime(target, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)

    @contextlib.contextmanager
    def _allowed(self, path: bytes, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._left_out.setdefault(f"{printable(path) or '/'}: {what}")

    def _place(self, path: bytes) -> bytes:
        return self._root + b"/" + path if path else self._root


def clone(target: int, source: int) -> bool:
    """Lets an empty file share all blocks of another; False where that is not possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True
