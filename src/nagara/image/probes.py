"""Tries out what file trees need of this kernel: overlay, data-only layers, EROFS files, FUSE.

Each probe does the thing once, on a small scale, and says what it found. It raises OSError, a
`NagaraError` or a `ProbeError` where that does not work. Mounts are made in a mount namespace of
a thread's own: whatever happens to this process, none of them is left. Blocking: some ten
milliseconds each.
"""

import contextlib
import ctypes
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from nagara.base.errors import NagaraError
from nagara.base.linux import MS_NODEV, MS_NOSUID, MS_RDONLY, mount, unshare
from nagara.image.frozen import freeze
from nagara.image.mounts import mount_erofs, mount_overlay, mount_points, unmount_if_mounted

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 0x40000
_CONTENT = b"nagara was here\n"
_SYS_FSOPEN, _SYS_FSCONFIG = 430, 431  # the same on every architecture
_FSCONFIG_SET_STRING, _FSOPEN_CLOEXEC = 1, 1
# struct fuse_in_header (40 bytes; opcode at 4), then struct fuse_init_in: see fuse(4).
_FUSE_INIT = struct.Struct("<40x5I")
_FUSE_OPCODE = struct.Struct("<4xI")
_FUSE_INIT_OPCODE = 26
_FUSE_PASSTHROUGH = 1 << 5  # bit 37 of the flags: bit 5 of their second word
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")

Result = TypeVar("Result")


class ProbeError(NagaraError):
    """The trial ended otherwise than it must."""


def try_overlay(scratch: Path) -> str:
    """A writable overlay whose layers lie in `scratch`, with a mark that hides a file."""
    parts = _folders(scratch / "overlay", "lower", "upper", "work", "root")
    lower, upper, work, root = parts
    (lower / "kept").write_bytes(_CONTENT)
    (lower / "hidden").write_bytes(b"")
    os.mknod(upper / "hidden", 0o020000, os.makedev(0, 0))

    def attempt() -> None:
        mount_overlay([lower], upper, work, root)
        with _unmounting(root):
            _require((root / "kept").read_bytes() == _CONTENT, "a lower file reads differently")
            _require(not (root / "hidden").exists(), "a whiteout hides nothing")
            (root / "new").write_bytes(_CONTENT)
        _require((upper / "new").read_bytes() == _CONTENT, "a new file is not in the upper layer")

    in_private_mounts(attempt)
    return f"upper layers on {_file_system(scratch)}"


def try_data_layers(scratch: Path) -> str:
    """A file whose content lies in a data-only layer, found through a mark on its entry."""
    meta, data, empty, root = _folders(scratch / "data", "meta", "data", "empty", "root")
    (data / "object").write_bytes(_CONTENT)
    entry = meta / "file"
    with entry.open("wb") as file:
        file.truncate(len(_CONTENT))
    os.setxattr(entry, "trusted.overlay.metacopy", b"")
    os.setxattr(entry, "trusted.overlay.redirect", b"/object")

    def attempt() -> None:
        options = f"lowerdir={meta}:{empty}::{data},metacopy=on,redirect_dir=follow"
        mount("overlay", root, "overlay", MS_RDONLY | MS_NODEV, options)
        with _unmounting(root):
            _require((root / "file").read_bytes() == _CONTENT, "the content is not found")
            _require(not (root / "object").exists(), "the data layer itself is visible")

    in_private_mounts(attempt)
    return "added one by one" if _takes_data_layer_alone(data) else "in one string of options only"


def _takes_data_layer_alone(data: Path) -> bool:
    """Whether layers can be given singly (fsconfig `datadir+`), so that there may be hundreds."""
    libc = ctypes.CDLL(None, use_errno=True)
    context = libc.syscall(_SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC)
    if context < 0:
        return False
    try:
        for key, folder in ((b"lowerdir+", data.parent / "meta"), (b"datadir+", data)):
            value = os.fsencode(folder)
            if libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, key, value, 0) != 0:
                return False
        return True
    finally:
        os.close(context)


def try_erofs(scratch: Path) -> str:
    """A tree written to one EROFS file, and that file mounted without a loop device."""
    tree, root = _folders(scratch / "erofs", "tree", "root")
    (tree / "file").write_bytes(_CONTENT)
    image = scratch / "erofs" / "image"
    size_bytes = freeze(tree, image)

    def attempt() -> None:
        mount_erofs(image, root)
        with _unmounting(root):
            _require((root / "file").read_bytes() == _CONTENT, "a file reads differently")

    in_private_mounts(attempt)
    return f"a file of {size_bytes} bytes, mounted directly"


def find_mkfs_erofs() -> str:
    """The program that writes EROFS files."""
    program = shutil.which("mkfs.erofs")
    if program is None:
        raise ProbeError("mkfs.erofs is not installed")
    return program


def try_fuse(scratch: Path) -> str:
    """A FUSE file system mounted, and the kernel's first message to it read."""
    major, minor, _ = _fuse_offer(scratch)
    return f"protocol {major}.{minor}"


def try_fuse_passthrough(scratch: Path) -> str:
    """Whether the kernel offers to read a FUSE file's content from another file by itself."""
    if not _fuse_offer(scratch)[2]:
        raise ProbeError("the kernel does not offer it (Linux 6.9 does)")
    return "offered by the kernel"


def _fuse_offer(scratch: Path) -> tuple[int, int, bool]:
    """(major, minor, passthrough) of the protocol that the kernel proposes."""
    (root,) = _folders(scratch / "fuse", "root")
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:

        def attempt() -> bytes:
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
            mount("nagara-doctor", root, "fuse", MS_NODEV | MS_NOSUID, options)
            with _unmounting(root):
                return os.read(device, 1 << 16)  # sent by the mount itself: never waited for

        message = in_private_mounts(attempt)
    finally:
        os.close(device)
    (opcode,) = _FUSE_OPCODE.unpack_from(message)
    _require(opcode == _FUSE_INIT_OPCODE, f"the first message has the opcode {opcode}")
    major, minor, _, _, more_flags = _FUSE_INIT.unpack_from(message.ljust(_FUSE_INIT.size, b"\0"))
    return major, minor, bool(more_flags & _FUSE_PASSTHROUGH)


def try_drop_caches() -> str:
    """Whether the page cache may be emptied; it is not."""
    with _DROP_CACHES.open("wb"):
        return "may be emptied"


def in_private_mounts(attempt: Callable[[], Result]) -> Result:
    """Runs `attempt` in a thread with a mount namespace of its own, which ends with it."""
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            unshare(_CLONE_NEWNS)
            mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE)
            outcome.append(attempt())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=body, name="probe with mounts")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


@contextlib.contextmanager
def _unmounting(root: Path) -> Iterator[None]:
    try:
        yield
    finally:
        unmount_if_mounted(root)


def _folders(parent: Path, *names: str) -> list[Path]:
    made = [parent / name for name in names]
    for folder in made:
        folder.mkdir(parents=True, exist_ok=True)
    return made


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProbeError(otherwise)


def _file_system(path: Path) -> str:
    """The kind of file system that `path` is on."""
    device = path.stat().st_dev
    wanted = (os.major(device), os.minor(device))
    found = (point.kind for point in mount_points() if point.device == wanted)
    return next(found, "an unnamed file system")
