"""The newer mount calls (fsopen, fsconfig, fsmount, move_mount): layers one by one, no escaping.

Needed for overlay's data-only layers, whose option string mount(2) would limit to one page and
split at colons and commas. Linux 5.2 and newer; `datadir+` 6.8 and newer. Needs root. Blocking,
far below a millisecond.
"""

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nagara.image.mounts import MountError

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
# The same on all architectures since 5.2.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_MOVE_FROM_DESCRIPTOR = 0x4
_AT_FDCWD = -100
RDONLY, NOSUID, NODEV = 0x1, 0x2, 0x4  # mount attributes
_VALUE_LIMIT = 255
# Said even where it is the default: some kernels are built with other ones.
_MAKE_NO_MARKS = {"metacopy": "off", "redirect_dir": "off", "index": "off"}
_FOLLOW_MARKS = {"metacopy": "on", "redirect_dir": "on", "index": "off"}


class FileSystem:
    """A file system being set up; use as a context manager."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._descriptor = _call(_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC, what=f"fsopen {kind}")

    def __enter__(self) -> "FileSystem":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def set(self, key: str, value: str | Path) -> None:
        """One option; may be given again for lists."""
        with _short(value) as text:
            self._config(_SET_STRING, key.encode(), text, f"{key}={value}")

    def flag(self, key: str) -> None:
        self._config(_SET_FLAG, key.encode(), None, key)

    def mount(self, target: Path, attributes: int) -> None:
        """Creates it and puts it at `target`."""
        self._config(_CREATE, None, None, "create")
        mounted = _call(
            _FSMOUNT, self._descriptor, _FSMOUNT_CLOEXEC, attributes, what=f"mount {self._kind}"
        )
        try:
            _call(
                _MOVE_MOUNT, mounted, b"", _AT_FDCWD, os.fsencode(target), _MOVE_FROM_DESCRIPTOR,
                what=f"mount {self._kind}", where=str(target),
            )  # fmt: skip
        finally:
            os.close(mounted)

    def _config(self, command: int, key: bytes | None, value: bytes | None, what: str) -> None:
        try:
            _call(_FSCONFIG, self._descriptor, command, key, value, 0, what=what)
        except MountError as error:
            raise MountError(f"{self._kind}: {error.what}{self._said()}") from error

    def _said(self) -> str:
        """What the kernel says about the fault, if anything."""
        with contextlib.suppress(OSError):
            return f" ({os.read(self._descriptor, 4096).decode(errors='replace').strip()})"
        return ""


def mount_overlay_on(
    lower: Sequence[Path],
    target: Path,
    *,
    data: Sequence[Path] = (),
    upper: Path | None = None,
    work: Path | None = None,
) -> None:
    """An overlay at `target`; without `upper` it is read-only.

    From Linux 6.16 on, `upper` above a single layer holds whole files and folders only, so that
    it can be a layer elsewhere. Above several, and before 6.16, data layers are not to be had
    without overlay's marks for files of which only the metadata was changed and for renamed
    folders: such an `upper` is a layer above the same stack and nowhere else.

    Args:
        lower: read-only layers, the topmost first.
        data: layers that only give bytes to files whose metadata is in `lower`.

    Raises:
        MountError: the kernel refused; says why.
    """
    layers = [("lowerdir+", layer) for layer in lower] + [("datadir+", layer) for layer in data]
    if upper is None or work is None:
        _mount_overlay(_FOLLOW_MARKS, layers, target, NODEV | RDONLY)
        return
    layers += [("upperdir", upper), ("workdir", work)]
    if not data:
        _mount_overlay(_MAKE_NO_MARKS, layers, target, NODEV)
        return
    if len(lower) == 1:  # without marks only the lowest layer may point to the data
        try:
            _mount_overlay(_MAKE_NO_MARKS, layers, target, NODEV)
            return
        except MountError as error:
            _log.debug("overlay with marks, since: %s", error)
    _mount_overlay(_FOLLOW_MARKS, layers, target, NODEV)


def _mount_overlay(
    options: dict[str, str], layers: Sequence[tuple[str, Path]], target: Path, attributes: int
) -> None:
    with FileSystem("overlay") as overlay:
        overlay.set("source", "nagara")
        for key, value in options.items():
            overlay.set(key, value)
        for key, layer in layers:
            overlay.set(key, layer)
        overlay.mount(target, attributes)


@contextlib.contextmanager
def _short(value: str | Path) -> Iterator[bytes]:
    """A value of at most 255 bytes; a longer path goes by a descriptor of it."""
    text = os.fsencode(value)
    if len(text) <= _VALUE_LIMIT or isinstance(value, str):
        yield text
        return
    descriptor = os.open(value, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}".encode()
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes | None, what: str, where: str | None = None) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        hint = "needs Linux 5.2 or newer" if code == errno.ENOSYS else None
        raise MountError(f"{what} refused: {os.strerror(code)}", where=where, hint=hint)
    return result
