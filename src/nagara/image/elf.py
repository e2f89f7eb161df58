"""Which shared libraries a program needs and where this machine has them.

It reads headers only and runs nothing. Format: elf(5), 64-bit little-endian; the search order is
that of ld.so(8): the file's RUNPATH or RPATH, then the system's folders and `ldconfig`'s list.
"""

import functools
import os
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_NEEDED, _STRTAB, _RPATH, _RUNPATH = 1, 5, 15, 29
_SYSTEM = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


class ElfFile(NamedTuple):
    """What the loader would look at."""

    interpreter: str | None
    needed: tuple[str, ...]
    search: tuple[str, ...]  # folders, `$ORIGIN` already resolved


class Closure(NamedTuple):
    """All libraries of some programs."""

    found: tuple[Path, ...]
    missing: tuple[str, ...]  # `libx.so.1 (needed by /usr/bin/y)`


def read_elf(path: Path) -> ElfFile | None:
    """None for what is no 64-bit little-endian ELF file, or not a whole one."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[:6] != b"\x7fELF\x02\x01":
                return None
            fields = _HEAD.unpack(head)
            at, size, count = fields[5], fields[9], fields[10]
            if size != _SEGMENT.size:
                return None
            file.seek(at)
            raw = file.read(size * count)
            segments = [_SEGMENT.unpack_from(raw, size * i) for i in range(len(raw) // size)]
            return _dynamic(file.fileno(), segments, path)
    except (OSError, struct.error, ValueError):
        return None


def _dynamic(file: int, segments: list[tuple[int, ...]], path: Path) -> ElfFile:
    interpreter = None
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, size, _, _ in segments:
        if kind == _INTERPRETER:
            interpreter = os.pread(file, min(size, 4096), offset).rstrip(b"\0").decode()
        elif kind == _DYNAMIC:
            raw = os.pread(file, min(size, 1 << 20), offset)
            entries = [_ENTRY.unpack_from(raw, at) for at in range(0, len(raw) - 15, 16)]
    table = next((value for tag, value in entries if tag == _STRTAB), None)
    offsets = [
        table - s[3] + s[2]
        for s in segments
        if table is not None and s[0] == _LOAD and s[3] <= table < s[3] + s[5]
    ]
    if not offsets:
        return ElfFile(interpreter, (), ())

    def text(value: int) -> str:
        return os.pread(file, 4096, offsets[0] + value).split(b"\0", 1)[0].decode()

    needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
    places = [text(value) for tag, value in entries if tag in (_RUNPATH, _RPATH)]
    origin = str(path.resolve().parent)
    search = tuple(
        place.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)
        for places_ in places
        for place in places_.split(":")
        if place
    )
    return ElfFile(interpreter, needed, search)


def library_closure(programs: Iterable[Path]) -> Closure:
    """Every library that the programs load, directly or not, and their interpreters."""
    found: dict[Path, None] = {}
    missing: dict[str, None] = {}
    pending = list(programs)
    names_seen: set[tuple[str, tuple[str, ...]]] = set()
    while pending:
        path = pending.pop()
        elf = read_elf(path)
        if elf is None:
            continue
        if elf.interpreter is not None:
            found.setdefault(Path(elf.interpreter))
        for name in elf.needed:
            if (name, elf.search) in names_seen:
                continue
            names_seen.add((name, elf.search))
            library = find_library(name, elf.search)
            if library is None:
                missing.setdefault(f"{name} (needed by {path})")
            elif library not in found:
                found.setdefault(library)
                pending.append(library)
    return Closure(tuple(found), tuple(missing))


def find_library(name: str, search: tuple[str, ...]) -> Path | None:
    """Where the loader would find a library; None when it would not."""
    for folder in search:
        if (Path(folder) / name).exists():
            return Path(folder) / name
    listed = _ldconfig().get(name)
    if listed is not None and Path(listed).exists():
        return Path(listed)
    return next((Path(f) / name for f in _SYSTEM if (Path(f) / name).exists()), None)


@functools.lru_cache(maxsize=1)
def _ldconfig() -> dict[str, str]:
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        found: dict[str, str] = {}
        for line in done.stdout.splitlines()[1:]:
            name, _, place = line.strip().partition(" => ")
            if "x86-64" in name or "AArch64" in name:
                found.setdefault(name.split(" ")[0], place)
        return found
    return {}
