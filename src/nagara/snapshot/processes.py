"""The processes of a container and the machine's files they are made of, read from /proc."""

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nagara.snapshot.catalog import FileMark


def processes_of(init_pid: int) -> list[int]:
    """All processes in the pid namespace of a container's first process."""
    namespace = Path(f"/proc/{init_pid}/ns/pid").readlink()
    return [pid for pid in _all_pids() if _namespace_of(pid) == namespace]


def _all_pids() -> Iterable[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _namespace_of(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:  # ended meanwhile
        return None


def host_files(
    init_pid: int, binds: Mapping[Path, Path], opened: Collection[str] = ()
) -> tuple[FileMark, ...]:
    """Marks of all files that come from the machine and not from the replica's layer: those that
    are mapped, and those of `opened`.

    Args:
        binds: folders shown to the replica: path inside → path on the machine.
        opened: paths inside.
    """
    inside = {path for pid in processes_of(init_pid) for _, _, _, path in file_mappings(pid)}
    inside.update(opened, *(_behind(path) for path in opened))
    root = Path(f"/proc/{init_pid}/root")
    marks = []
    for path in sorted(inside):
        outside = _on_machine(Path(path), binds)
        try:
            seen = (root / path.lstrip("/")).stat()
            here = outside.stat()
        except OSError:
            continue  # deleted or inside the replica's layer only: the checkpoint carries it
        if (seen.st_size, seen.st_mtime_ns) == (here.st_size, here.st_mtime_ns):
            marks.append(FileMark(str(outside), here.st_size, here.st_mtime_ns))
    return tuple(marks)


def _behind(path: str) -> Iterator[str]:
    """What else decides about an opened file: the source of compiled Python, which is looked at
    but not opened; the folder of its environment, which changes with what is installed there."""
    folder, _, name = path.rpartition("/")
    if name.endswith(".pyc"):
        try:
            yield importlib.util.source_from_cache(path)
        except ValueError:  # not from a cache
            return
    for packages in ("/site-packages", "/dist-packages"):
        if packages + "/" in folder + "/":
            yield folder[: (folder + "/").index(packages + "/")] + packages


class FileMapping(NamedTuple):
    """One line of /proc/PID/maps that is of a file: addresses, where in the file they begin."""

    begin: int
    end: int
    offset: int
    path: str


def file_mappings(pid: int) -> Iterator[FileMapping]:
    """What a process has mapped of files; nothing of one that has ended meanwhile."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            yield FileMapping(begin, end, int(fields[2], 16), fields[5])


def _on_machine(path: Path, binds: Mapping[Path, Path]) -> Path:
    for inside, outside in binds.items():
        if path.is_relative_to(inside):
            return outside / path.relative_to(inside)
    return path
