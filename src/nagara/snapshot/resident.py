"""Which parts of its files a process has in its page tables. Read from /proc; blocking.

One that was just put back begins with none: what it has then is what it had to read, and what the
next one put back will read. So are pages that were written to: the tool writes what it has saved
over what it maps, and the kernel reads a page of a file before it is written over.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nagara.snapshot.processes import file_mappings

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENTRY_BYTES = 8  # of /proc/PID/pagemap, little-endian: bit 63 present, bit 62 swapped out
_IS_THERE = bytes(byte >= 0x40 for byte in range(256))  # by an entry's last byte
_BLOCK_BYTES = 256 << 20  # of memory that is looked at at a time


class Part(NamedTuple):
    """A part of a file, named by its path as the process sees it."""

    path: str
    number: int  # of the part, counted in parts of one size


def resident_parts(pids: Iterable[int], part_bytes: int) -> list[Part]:
    """The parts of mapped files that any of the processes has in its page tables, and the first
    part of whatever else they have mapped or open, each once. What ends meanwhile is left out."""
    found: dict[Part, None] = {}
    for pid in pids:
        try:
            found |= dict.fromkeys(_mapped(pid, part_bytes))
            found |= dict.fromkeys(_open(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return list(found)


def _mapped(pid: int, part_bytes: int) -> Iterator[Part]:
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - unbuffered
        for begin, end, offset, path in file_mappings(pid):
            yield Part(path, 0)
            for first in range(begin, end, _BLOCK_BYTES):
                last = min(end, first + _BLOCK_BYTES)
                entries = _entries(pagemap.fileno(), first, last)
                for number in _numbers(entries, offset + first - begin, part_bytes):
                    yield Part(path, number)


def _entries(pagemap: int, begin: int, end: int) -> bytes:
    count, at = (end - begin) // _PAGE_BYTES, begin // _PAGE_BYTES
    return os.pread(pagemap, count * _ENTRY_BYTES, at * _ENTRY_BYTES)


def _numbers(entries: bytes, offset: int, part_bytes: int) -> Iterator[int]:
    """The parts of a file that are there, given the entries of its pages from `offset` on."""
    is_there = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_IS_THERE)
    page = is_there.find(1)
    while page >= 0:
        number = (offset + page * _PAGE_BYTES) // part_bytes
        yield number
        page = is_there.find(1, ((number + 1) * part_bytes - offset) // _PAGE_BYTES)


def _open(pid: int) -> Iterator[Part]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("/"):
            yield Part(target, 0)
