"""What this machine can mount, found by trying, and what follows from it.

Everything is tried in a scratch folder and taken down again; nothing is concluded from version
numbers. Needs no root: without it nearly everything is simply not there. Blocking, some
milliseconds.
"""

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.checkout import clone
from nagara.image.index import build_index
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounting import Method, mount_index
from nagara.image.mounts import mount_erofs, unmount_if_mounted
from nagara.image.tree import new_folder


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing: whether it is there, what it is for, and what happens without it."""

    name: str
    is_there: bool
    purpose: str
    without: str


@dataclass(frozen=True, slots=True)
class FilesCapabilities:
    """What was found out."""

    root: bool
    erofs_file: bool
    erofs_loop: bool
    overlay_data: bool
    fuse: bool
    reflink: bool
    handover: bool  # a new daemon may go on with the old one's mount

    def method(self) -> Method:
        """How images are shown here. Pure."""
        if self.root and self.overlay_data and (self.erofs_file or self.erofs_loop):
            return "overlay" if self.fuse else "checkout"
        return "tree" if self.root and self.fuse else "checkout"

    def described(self) -> tuple[Capability, ...]:
        """For people, in the order of importance."""
        return (
            Capability("root", self.root, "mounting images", "images are copied before a start"),
            Capability("FUSE", self.fuse, "contents that come when they are read",
                       "images are copied out before a start"),
            Capability("overlay data-only layers", self.overlay_data, "metadata without a daemon",
                       "one FUSE file system for the whole tree, slower"),
            Capability("EROFS file mounts", self.erofs_file, "an index mounted from its file",
                       "a loop device for each index" if self.erofs_loop
                       else "one FUSE file system for the whole tree, slower"),
            Capability("FUSE resend", self.handover, "a new daemon goes on after a crash",
                       "readers get ENOTCONN when the daemon dies"),
            Capability("reflink", self.reflink, "copies that share blocks", "copies take space"),
        )  # fmt: skip


def probe(folder: Path) -> FilesCapabilities:
    """Tries everything in a scratch folder below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    is_root = os.geteuid() == 0
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".probe-"))
    try:
        index = scratch / "index"
        index.write_bytes(b"".join(build_index(new_folder())))
        lower, data, target = (scratch / name for name in ("e", "d", "m"))
        for each in (lower, data, target):
            each.mkdir()
        by_file = is_root and _works(lambda: mount_erofs(index, lower), lower)
        by_loop = by_file or (is_root and _works(lambda: mount_index(index, lower), lower))
        overlay = is_root and _works(lambda: mount_overlay_on([lower], target, data=[data]), target)
        return FilesCapabilities(
            root=is_root,
            erofs_file=by_file,
            erofs_loop=by_loop,
            overlay_data=overlay,
            fuse=is_root and os.access("/dev/fuse", os.R_OK | os.W_OK),
            reflink=_canclone(scratch),
            handover=_kernel() >= (6, 9),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _works(attempt: Callable[[], None], target: Path) -> bool:
    try:
        attempt()
    except (NagaraError, OSError):
        return False
    unmount_if_mounted(target)
    return True


def _canclone(folder: Path) -> bool:
    source, target = folder / "source", folder / "target"
    source.write_bytes(bytes(8192))
    with source.open("rb") as reading, target.open("wb") as writing:
        return clone(writing.fileno(), reading.fileno())


def _kernel() -> tuple[int, int]:
    """The one thing that cannot be tried without a daemon to kill."""
    with contextlib.suppress(ValueError, IndexError):
        major, minor = platform.release().split(".")[:2]
        return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
    return 0, 0
