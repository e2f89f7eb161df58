"""The processes of a container and the machine's files they have mapped, read from /proc."""

from collections.abc import Iterable, Mapping
from pathlib import Path

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


def mapped_host_files(init_pid: int, binds: Mapping[Path, Path]) -> tuple[FileMark, ...]:
    """Marks of all mapped files that come from the machine and not from the replica's layer.

    Args:
        binds: folders shown to the replica: path inside → path on the machine.
    """
    inside = {path for pid in processes_of(init_pid) for path in _mapped(pid)}
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


def _mapped(pid: int) -> Iterable[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return ()
    fields = (line.split(maxsplit=5) for line in lines)
    return (entry[5] for entry in fields if len(entry) == 6 and entry[5].startswith("/"))


def _on_machine(path: Path, binds: Mapping[Path, Path]) -> Path:
    for inside, outside in binds.items():
        if path.is_relative_to(inside):
            return outside / path.relative_to(inside)
    return path
