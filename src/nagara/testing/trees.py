"""What a folder holds, in a form that two of them can be compared by."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

_PIECE_BYTES = 1 << 20


def listing(root: Path, *, contents: bool = True) -> dict[bytes, tuple[Any, ...]]:
    """Path below `root` → everything that lstat, attributes, links and contents say of it.

    Sizes of folders and times of access are the file system's own business and left out. Files
    with several names carry the first of them.
    """
    found: dict[bytes, tuple[Any, ...]] = {}
    first_names: dict[int, bytes] = {}
    start = os.fsencode(root)
    pending = [b""]
    while pending:
        path = pending.pop()
        full = start + b"/" + path if path else start
        state = os.lstat(full)
        kind = stat.S_IFMT(state.st_mode)
        if kind == stat.S_IFDIR:
            names = sorted(os.listdir(full))  # noqa: PTH208 - bytes
            pending += [path + b"/" + name if path else name for name in names[::-1]]
        found[path] = (
            oct(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns,
            state.st_size if kind == stat.S_IFREG else None,
            state.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else None,
            None if kind == stat.S_IFDIR else state.st_nlink,
            None if kind == stat.S_IFDIR else first_names.setdefault(state.st_ino, path),
            os.readlink(full) if kind == stat.S_IFLNK else None,  # noqa: PTH115 - bytes
            _xattrs(full),
            _digest(full, state.st_size) if contents and kind == stat.S_IFREG else None,
        )  # fmt: skip
    return found


def _xattrs(full: bytes) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(full, follow_symlinks=False))
    return tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in names)


def _digest(full: bytes, size: int) -> str:
    """Of the content; a hole is skipped where the file system tells."""
    digest = hashlib.sha256()
    descriptor = os.open(full, os.O_RDONLY)
    try:
        at = 0
        while at < size:
            piece = os.pread(descriptor, _PIECE_BYTES, at)
            if not piece:
                break
            digest.update(piece)
            at += len(piece)
    finally:
        os.close(descriptor)
    return f"{at}:{digest.hexdigest()}"
