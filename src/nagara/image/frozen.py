"""A replica's upper layer made immutable: one EROFS file that keeps overlay's marks.

Whiteouts (character device 0:0), opaque folders, owners, modes, links, sockets and fifos are
kept, so that the layer can lie below a new upper layer and mean the same. Being a file system
of its own it may lie on top of any other layer.

Written by `mkfs.erofs` (package erofs-utils); blocking, call from a worker thread.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from nagara.base.errors import NagaraError

_TIME_LIMIT_S = 600.0
# Overlay's notes to itself about where a file came from. They name inodes of the layers at
# hand, are wrong anywhere else, and are not needed to read the layer.
_PRIVATE_MARKS = ("trusted.overlay.origin", "trusted.overlay.impure", "trusted.overlay.uuid")


class FreezeError(NagaraError):
    """The layer cannot be made immutable."""


def freeze(upper: Path, image: Path) -> int:
    """Writes the layer in `upper` to the file `image`; returns its size in bytes.

    Nothing may write to the layer meanwhile.

    Raises:
        FreezeError: mkfs.erofs is missing or failed.
    """
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise FreezeError(
            "mkfs.erofs is not installed", hint="apt-get install erofs-utils (or: nagara setup)"
        )
    _drop_private_marks(upper)
    try:
        done = subprocess.run(
            [program, "-x", "1", "--quiet", str(image), str(upper)],
            cwd=image.parent,  # by which it is found when this process is killed meanwhile
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FreezeError(
            f"mkfs.erofs took over {_TIME_LIMIT_S:.0f} s", where=str(upper)
        ) from error
    if done.returncode != 0:
        raise FreezeError(f"mkfs.erofs failed: {done.stderr.strip()[-300:]}", where=str(upper))
    return image.stat().st_size


def _drop_private_marks(upper: Path) -> None:
    for path in _walk(upper):
        for name in os.listxattr(path, follow_symlinks=False):
            if name in _PRIVATE_MARKS:
                os.removexattr(path, name, follow_symlinks=False)


def manifest(tree: Path) -> dict[str, tuple[int, int, int]]:
    """What a layer holds: path below `tree` → (mode, device, size in bytes; 0 for folders)."""
    listing = {}
    for path in _walk(tree):
        state = path.lstat()
        size = state.st_size if stat.S_ISREG(state.st_mode) else 0
        listing[str(path.relative_to(tree))] = (state.st_mode, state.st_rdev, size)
    return listing


def _walk(tree: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            yield Path(folder) / name
