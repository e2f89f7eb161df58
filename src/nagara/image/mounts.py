"""Mounting the trees that replicas see, and finding what is mounted. Needs root.

Blocking, each call well below a millisecond: the calling thread may be an event loop's.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.linux import MNT_DETACH, MS_NODEV, MS_NOSUID, MS_RDONLY, mount, unmount
from nagara.image.xattrs import REDIRECT
from nagara.store.errors import BadNameError
from nagara.store.names import ObjectName, parse_name

# A mount(2) call passes its options in one page.
_OPTIONS_LIMIT_BYTES = 4095


class MountError(NagaraError):
    """The kernel refused a mount; the message carries its reason."""


def mount_overlay(lower: Sequence[Path], upper: Path, work: Path, target: Path) -> None:
    """A writable tree at `target`: `upper` over the `lower` layers, the topmost first.

    Raises:
        MountError: the kernel refused, or the paths are too long together.
    """
    layers = ":".join(_escaped(layer) for layer in lower)
    options = f"lowerdir={layers},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    # Some kernels are built to use these without being asked. A layer that does means something
    # else, or nothing, below another layer.
    options += ",redirect_dir=off,metacopy=off,index=off"
    if len(os.fsencode(options)) > _OPTIONS_LIMIT_BYTES:
        raise MountError(
            "the layers' paths are too long for one mount",
            where=str(target),
            hint="use a state folder with a shorter path",
        )
    _mount("overlay", target, "overlay", MS_NODEV, options)


def mount_erofs(image: Path, target: Path) -> None:
    """The read-only tree inside the EROFS file `image`, at `target` (Linux 6.12 or newer)."""
    _mount(str(image), target, "erofs", MS_RDONLY | MS_NODEV | MS_NOSUID, "")


def _mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    try:
        mount(source, target, kind, flags, options)
    except OSError as error:
        raise MountError(f"{kind} mount refused: {error.strerror}", where=str(target)) from error


def _escaped(path: Path) -> str:
    """Overlay splits layers at colons and options at commas; a backslash protects both."""
    text = str(path)
    for special in "\\:,":
        text = text.replace(special, "\\" + special)
    return text


def unmount_if_mounted(target: Path) -> bool:
    """Unmounts what is at `target`, lazily where it is in use; False when nothing was there."""
    try:
        unmount(target)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        if error.errno != errno.EBUSY:
            raise MountError(f"cannot be unmounted: {error.strerror}", where=str(target)) from error
        unmount(target, MNT_DETACH)
    return True


def object_behind(layers: Sequence[Path], path: str) -> ObjectName | None:
    """The object that has the content of a file in a stack of mounted indexes, the topmost first;
    None for what has none: small files, and what is not in the image."""
    for layer in layers:
        try:
            target = os.getxattr(layer / path.lstrip("/"), REDIRECT, follow_symlinks=False)
            return parse_name(os.fsdecode(target).removeprefix("/"))
        except FileNotFoundError:
            continue
        except (OSError, BadNameError):
            return None
    return None


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of mountinfo."""

    target: Path
    kind: str
    source: str
    device: tuple[int, int]  # major, minor


def mount_points(below: Path | None = None) -> list[MountPoint]:
    """This namespace's mounts at or below a folder, deepest first. See proc(5)."""
    points = []
    # Paths need be no text, and may hold what str.splitlines() takes for the end of a line.
    lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
    for line in filter(None, lines):
        fields = line.split(" ")
        separator = fields.index("-")
        target = Path(_unquoted(fields[4]))
        if below is None or target.is_relative_to(below):
            kind, source = fields[separator + 1], _unquoted(fields[separator + 2])
            major, _, minor = fields[2].partition(":")
            points.append(MountPoint(target, kind, source, (int(major), int(minor))))
    return sorted(points, key=lambda point: len(point.target.parts), reverse=True)


def device_of(target: Path) -> tuple[int, int] | None:
    """Device number of the topmost mount at `target`, without asking whoever serves it."""
    found = [point.device for point in mount_points(target) if point.target == target]
    return found[-1] if found else None


def _unquoted(field: str) -> str:
    """mountinfo writes blank, tab, newline, `#` and backslash as octal escapes."""
    for character in " \t\n#\\":  # the backslash last: it begins the others
        field = field.replace(f"\\{ord(character):03o}", character)
    return field


def unmount_tree(folder: Path) -> int:
    """Unmounts everything at and below `folder`, deepest first; returns how many there were."""
    points = mount_points(folder)
    for point in points:
        unmount_if_mounted(point.target)
    return len(points)
