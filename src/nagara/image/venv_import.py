"""A virtual environment as an image of its own, with all it needs to run.

Into the image go, at the paths they have on this machine: the environment, folders that its path
files name (such as the sources of an editable installation), the interpreter it was made from
with its standard library, the shared libraries of all of them as the loader would find them, the
loader itself, and the few files of /etc without which programs misbehave. What a library needs
and this machine does not have is reported, not guessed. Blocking.
"""

import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from nagara.image.content_writer import ContentWriter
from nagara.image.elf import library_closure
from nagara.image.errors import SourceError
from nagara.image.folder_import import import_folder
from nagara.image.tree import Node, new_folder

_ETC = {
    "passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": b"root:x:0:\nnogroup:x:65534:\n",
    "nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": b"127.0.0.1 localhost\n::1 localhost\n",
}
_FOLDERS = {"tmp": 0o1777, "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "root": 0o700}
_MERGED = ("bin", "lib", "lib64", "sbin")  # links into usr on systems of today
_LEFT_OUT_OF_LIBRARY = ("test", "idlelib", "turtledemo")
_TREES = ("usr/share/zoneinfo", "etc/ssl/certs", "usr/lib/ssl", "usr/share/ca-certificates")


@dataclass(frozen=True, slots=True)
class VenvImport:
    """The tree, and what it will miss."""

    tree: Node
    python: Path
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a virtual environment consists of."""

    venv: Path
    python: Path
    library: Path
    named: tuple[Path, ...]  # by its path files


def venv_roots(venv: Path) -> list[Path]:
    """Everything that an import depends on: when none of it has changed, the image is the same.

    The loader's cache stands for the shared libraries of the system.
    """
    parts = _parts(venv)
    trees = [Path("/") / tree for tree in _TREES]
    cache = Path("/etc/ld.so.cache")
    return [parts.venv, parts.python.resolve(), parts.library, *parts.named, *trees, cache]


def _parts(venv: Path) -> _Parts:
    venv = venv.absolute()
    python = venv / "bin/python"
    if not (venv / "pyvenv.cfg").is_file() or not python.exists():
        raise SourceError("is no virtual environment", where=str(venv))
    base = python.resolve().parent.parent
    version = _version(venv)
    library = base / "lib" / f"python{version}"
    if not (library / "os.py").is_file():
        raise SourceError(
            f"the interpreter's standard library is not at {library}", where=str(venv)
        )
    packages = venv / "lib" / f"python{version}" / "site-packages"
    return _Parts(venv, python, library, tuple(_named_folders(packages, venv)))


def import_venv(venv: Path, writer: ContentWriter) -> VenvImport:
    """Raises `SourceError` for a folder that is no virtual environment of a CPython here."""
    parts = _parts(venv)
    image = _Image(writer)
    image.prepare()
    image.add_tree(parts.venv)
    for folder in parts.named:
        hidden = {os.fsencode(each.name) for each in folder.glob(".*")}
        image.add_tree(folder, leave_out=hidden)  # what is hidden cannot be imported
    image.add_file(parts.python.resolve())
    image.add_links_to(parts.python)
    left_out = {name.encode() for name in _LEFT_OUT_OF_LIBRARY} | {b"site-packages"}
    image.add_tree(parts.library, leave_out=left_out)
    for tree in _TREES:
        if (Path("/") / tree).is_dir():
            image.add_tree(Path("/") / tree)
    programs = [parts.python.resolve()]
    for folder in (parts.venv, parts.library / "lib-dynload", *parts.named):
        programs += _shared_objects(folder)
    closure = library_closure(programs)
    for found in closure.found:
        image.add_links_to(found)
        image.add_file(found.resolve())
    return VenvImport(image.root, parts.python, closure.missing)


def _version(venv: Path) -> str:
    for line in (venv / "pyvenv.cfg").read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return ".".join(value.strip().split(".")[:2])
    return sysconfig.get_python_version()


def _named_folders(site_packages: Path, venv: Path) -> list[Path]:
    """Folders outside the environment that its path files add to the search path. See site(3)."""
    found: dict[Path, None] = {}
    for file in sorted(site_packages.glob("*.pth")):
        for line in file.read_text(errors="replace").splitlines():
            text = line.strip()
            if text and not text.startswith(("#", "import ", "import\t")):
                folder = Path(os.path.normpath(site_packages / text))
                if folder.is_dir() and not folder.is_relative_to(venv):
                    found[folder] = None
    return list(found)


def _shared_objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.so*") if path.is_file()]


class _Image:
    """A tree that grows by what this machine has at the same path."""

    def __init__(self, writer: ContentWriter) -> None:
        self.root = new_folder()
        self._writer = writer
        self._files: dict[tuple[int, int], Node] = {}

    def prepare(self) -> None:
        for name in _MERGED:
            here = Path("/") / name
            if here.is_symlink():
                self._put(
                    Path(name), Node(stat.S_IFLNK | 0o777, target=os.fsencode(here.readlink()))
                )
        for name, mode in _FOLDERS.items():
            self._folder(Path(name)).mode = stat.S_IFDIR | mode
        for name, content in _ETC.items():
            node = Node(stat.S_IFREG | 0o644)
            self._writer.add_bytes(node, content)
            self._put(Path("etc") / name, node)

    def add_tree(self, folder: Path, leave_out: set[bytes] | None = None) -> None:
        """A folder with all that is in it."""
        found = import_folder(folder, self._writer, leave_out=leave_out or ())
        place = self._folder(folder.relative_to("/"))
        place.mode, place.uid, place.gid = found.mode, found.uid, found.gid
        place.mtime_ns, place.xattrs = found.mtime_ns, found.xattrs
        assert found.kids is not None
        assert place.kids is not None
        place.kids |= found.kids

    def add_file(self, path: Path) -> None:
        """One regular file."""
        state = path.stat()
        key = (state.st_dev, state.st_ino)
        node = self._files.get(key)
        if node is None:
            node = self._files[key] = Node(
                state.st_mode, uid=state.st_uid, gid=state.st_gid, mtime_ns=state.st_mtime_ns
            )
            self._writer.add_path(node, os.fsencode(path))
        self._put(path.relative_to("/"), node)

    def add_links_to(self, path: Path) -> None:
        """The links one passes on the way from a path to the file behind it."""
        while path.is_symlink():
            target = path.readlink()
            self._put(path.relative_to("/"), Node(stat.S_IFLNK | 0o777, target=os.fsencode(target)))
            path = Path(os.path.normpath(path.parent.resolve() / target))

    def _put(self, path: Path, node: Node) -> None:
        folder = self._folder(path.parent)
        assert folder.kids is not None
        folder.kids.setdefault(os.fsencode(path.name), node)

    def _folder(self, path: Path) -> Node:
        """A folder of the image; links among its parents are followed inside it."""
        here = self.root
        parts = list(path.parts)[::-1]
        while parts:
            name = os.fsencode(parts.pop())
            assert here.kids is not None
            kid = here.kids.get(name)
            if kid is None:
                kid = here.kids[name] = new_folder()
            elif kid.target is not None:
                target = Path(os.fsdecode(kid.target))
                if target.is_absolute():
                    here = self.root
                    target = target.relative_to("/")
                parts += list(target.parts)[::-1]
                continue
            here = kid
        return here
