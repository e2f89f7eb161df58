"""The `host` image: this machine's own tree, read-only, for development.

A replica sees the machine's root file system below its own writable layer, so any program that
is installed here runs. What it must not see is hidden by marks put into that layer before the
start: root's home, other homes' secrets by their own modes, temporary and run-time files, the
password hashes, the machine's private keys, and the state of nagara itself. Folders that
nagara's environment needs and that lie below something hidden, or on another file system
(overlay does not cross mounts), are bound in read-only.

The kernel refuses a lower layer that lies inside another one, and everything on this machine
lies below `/`; therefore the marks live in the upper layer, and a frozen layer is a file of its
own kind (see `frozen`).
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_OPAQUE = b"y"
_EMPTIED = {Path("/root"): 0o700, Path("/run"): 0o755, Path("/tmp"): 0o1777}  # noqa: S108
_REMOVED = tuple(Path("/etc") / name for name in ("shadow", "shadow-", "gshadow", "gshadow-"))
_EMPTIED_IF_PRESENT = {
    Path("/var/tmp"): 0o1777,  # noqa: S108
    Path("/etc/ssh"): 0o755,
    Path("/etc/ssl/private"): 0o700,
}
_WHITEOUT = os.makedev(0, 0)


@dataclass(frozen=True, slots=True)
class HostImage:
    """This machine's tree.

    Args:
        state: nagara's state folder, hidden.
        needed: folders that must be visible even where they would be hidden.
    """

    state: Path
    needed: tuple[Path, ...]

    @property
    def layers(self) -> tuple[Path, ...]:
        """The read-only layers below a replica's own, topmost first."""
        return (_ROOT,)

    def prepare_upper(self, upper: Path) -> None:
        """Puts the marks that hide things into a new, empty upper layer.

        Raises OSError where the file system cannot carry overlay's marks.
        """
        hidden = {**_EMPTIED, **{p: m for p, m in _EMPTIED_IF_PRESENT.items() if p.is_dir()}}
        hidden[self.state.resolve()] = 0o700
        for folder, mode in hidden.items():
            _make_folders(upper, folder)
            marked = _inside(upper, folder)
            marked.chmod(mode)
            os.setxattr(marked, "trusted.overlay.opaque", _OPAQUE)
        _make_folders(upper, Path("/etc"))
        for file in _REMOVED:
            if file.exists():
                os.mknod(_inside(upper, file), stat.S_IFCHR, _WHITEOUT)

    def bound_folders(self) -> tuple[Path, ...]:
        """The needed folders that are hidden or on another file system, without duplicates.

        One that nagara's state lies in is left out: a replica would see all secrets and the
        mounts of all others.
        """
        state = self.state.resolve()
        hidden = (*_EMPTIED, *_EMPTIED_IF_PRESENT, state)
        root_device = _ROOT.stat().st_dev
        bound: list[Path] = []
        for folder in sorted({path.resolve() for path in self.needed if path.exists()}):
            if state.is_relative_to(folder):
                continue  # it would show nagara's state, and every replica's root inside it
            if any(folder.is_relative_to(other) for other in bound):
                continue
            is_hidden = any(folder.is_relative_to(place) for place in hidden)
            if is_hidden or folder.stat().st_dev != root_device:
                bound.append(folder)
        return tuple(bound)

    def fingerprint(self) -> str:
        """Changes when packages of this machine change; part of a snapshot's key.

        Single files are checked besides, one by one, by the snapshot itself.
        """
        facts = []
        for record in (Path("/var/lib/dpkg/status"), Path("/etc/os-release")):
            if record.exists():
                state = record.stat()
                facts.append(f"{record}:{state.st_size}:{state.st_mtime_ns}")
        return ";".join(["host", *facts])


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to(_ROOT)


def _make_folders(upper: Path, folder: Path) -> None:
    """Creates `folder` and its parents in the layer with the modes they have on the machine.

    A folder in the upper layer covers the attributes of the one below it.
    """
    for part in [*reversed(folder.parents), folder]:
        here = _inside(upper, part)
        if part != _ROOT and not here.exists():
            here.mkdir()
            if part.is_dir():
                state = part.stat()
                here.chmod(stat.S_IMODE(state.st_mode))
                os.chown(here, state.st_uid, state.st_gid)
