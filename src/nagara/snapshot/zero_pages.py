"""Taking the zero pages out of a saved process. Blocking: worker threads only.

    pagemap-PID.img   which pages of the address space were saved, in order
    pages-N.img       their contents, in the same order
    mm-PID.img        the mappings

A page that is nowhere in the pagemap is left untouched by the restore, and private anonymous
memory is zero on its first touch: such pages need not be carried. In a mapping of a file the
file's own content would show through, and memory shared by processes is left alone too.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nagara.snapshot.criu_images import (
    Field,
    ImageFile,
    ImageFormatError,
    encode_message,
    number_of,
    parse_message,
)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ZERO_PAGE = bytes(_PAGE_BYTES)
_BLOCK_PAGES = 256
_WORTH = 20  # one page in this many must be zero, or writing the rest anew costs more than it saves

# Field numbers and bits of CRIU's pagemap.proto, mm.proto, vma.proto and image.h.
_PAGES_ID = 1
_ADDRESS, _FLAGS, _COUNT = 1, 4, 5
_PRESENT = 1 << 2
_MAPPINGS = 14
_START, _END, _STATUS = 1, 2, 7
_ANONYMOUS_PRIVATE = 1 << 9


@dataclass(frozen=True, slots=True)
class Run:
    """Pages in a row in the address space, all carried or all zero."""

    first: int
    count: int
    is_zero: bool


class Anonymous:
    """The private anonymous mappings of one process."""

    def __init__(self, intervals: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]

    @classmethod
    def of(cls, mm: ImageFile) -> "Anonymous":
        """Reads them from a process's mm image. Raises `ImageFormatError`."""
        intervals = []
        for field in (field for message in mm.messages for field in parse_message(message)):
            if field.number != _MAPPINGS or not isinstance(field.value, bytes):
                continue
            mapping = parse_message(field.value)
            start, end = number_of(mapping, _START), number_of(mapping, _END)
            if start is None or end is None:
                raise ImageFormatError("has a mapping without its bounds")
            if (number_of(mapping, _STATUS) or 0) & _ANONYMOUS_PRIVATE:
                intervals.append((start, end))
        return cls(sorted(intervals))

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def runs(pages: bytes, address: int, anonymous: Anonymous) -> Iterator[Run]:
    """Splits the pages saved from `address` on; `Run.first` counts from the first of them."""
    begin = 0
    was_zero = False
    count = len(pages) // _PAGE_BYTES
    for page in range(count):
        at = page * _PAGE_BYTES
        is_zero = pages[at : at + _PAGE_BYTES] == _ZERO_PAGE and address + at in anonymous
        if is_zero != was_zero and page > begin:
            yield Run(begin, page - begin, was_zero)
            begin = page
        was_zero = is_zero
    if count > begin:
        yield Run(begin, count - begin, was_zero)


def drop_zero_pages(memory: Path) -> int:
    """Rewrites the images in `memory` without zero pages; returns the bytes saved.

    Processes with few of them stay as they are.

    Raises:
        ImageFormatError: an image is not of the form this was written for. Nothing of that
            process has been changed.
        OSError: a file cannot be read or written; the folder must not be used then.
    """
    saved_bytes = 0
    for pagemap in sorted(memory.glob("pagemap-[0-9]*.img")):
        mm = memory / pagemap.name.replace("pagemap", "mm")
        try:
            saved_bytes += _Process(pagemap, mm).shrink()
        except ImageFormatError as error:
            raise ImageFormatError(f"{pagemap.name}: {error}") from error
    return saved_bytes


class _Process:
    """The images of one saved process."""

    def __init__(self, pagemap: Path, mm: Path) -> None:
        self._pagemap = pagemap
        self._anonymous = Anonymous.of(ImageFile.parse(mm.read_bytes()))
        self._image = ImageFile.parse(pagemap.read_bytes())
        if not self._image.messages:
            raise ImageFormatError("names no file of pages")
        pages_id = number_of(parse_message(self._image.messages[0]), _PAGES_ID)
        self._pages = pagemap.with_name(f"pages-{pages_id}.img")
        self._entries = [parse_message(message) for message in self._image.messages[1:]]
        expected = sum(_count(entry) for entry in self._entries if _is_here(entry))
        if self._pages.stat().st_size != expected * _PAGE_BYTES:
            raise ImageFormatError(f"does not describe the size of {self._pages.name}")

    def shrink(self) -> int:
        """Returns the bytes saved, 0 when it was not worth it."""
        with self._pages.open("rb") as pages:
            zero = sum(run.count for *_, run in self._runs(pages) if run.is_zero)
            if zero * _WORTH * _PAGE_BYTES < self._pages.stat().st_size or not zero:
                return 0
            pages.seek(0)
            shorter = self._pages.with_suffix(".shorter")
            with shorter.open("xb") as file:
                entries = self._write(pages, file)
        messages = (self._image.messages[0], *map(encode_message, entries))
        self._pagemap.write_bytes(ImageFile(self._image.head, messages).content())
        shorter.replace(self._pages)
        return zero * _PAGE_BYTES

    def _runs(self, pages: BinaryIO) -> Iterator[tuple[int, int, bytes, Run]]:
        """Of each entry in turn: its index, and per run its first page within the entry, the block
        of pages it was read in, and the run within that."""
        for index, entry in enumerate(self._entries):
            if not _is_here(entry):
                continue
            address, count = number_of(entry, _ADDRESS) or 0, _count(entry)
            for begin in range(0, count, _BLOCK_PAGES):
                block = pages.read(min(count - begin, _BLOCK_PAGES) * _PAGE_BYTES)
                for run in runs(block, address + begin * _PAGE_BYTES, self._anonymous):
                    yield index, begin + run.first, block, run

    def _write(self, pages: BinaryIO, file: BinaryIO) -> list[tuple[Field, ...]]:
        """Writes what is carried; returns the entries that describe it."""
        pieces: dict[int, list[list[int]]] = {}
        for index, first, block, run in self._runs(pages):
            if run.is_zero:
                continue
            file.write(memoryview(block)[run.first * _PAGE_BYTES :][: run.count * _PAGE_BYTES])
            of_entry = pieces.setdefault(index, [])
            if of_entry and sum(of_entry[-1]) == first:
                of_entry[-1][1] += run.count
            else:
                of_entry.append([first, run.count])
        return [
            piece
            for index, entry in enumerate(self._entries)
            for piece in _pieces(entry, pieces.get(index, []))
        ]


def _pieces(entry: tuple[Field, ...], parts: Sequence[Sequence[int]]) -> list[tuple[Field, ...]]:
    if not _is_here(entry):
        return [entry]
    address = number_of(entry, _ADDRESS) or 0
    return [
        tuple(
            Field(field.number, field.kind, address + first * _PAGE_BYTES)
            if field.number == _ADDRESS
            else Field(field.number, field.kind, count)
            if field.number == _COUNT
            else field
            for field in entry
        )
        for first, count in parts
    ]


def _count(entry: tuple[Field, ...]) -> int:
    count = number_of(entry, _COUNT)
    if count is None:
        raise ImageFormatError("has an entry without a number of pages")
    return count


def _is_here(entry: tuple[Field, ...]) -> bool:
    """Whether the entry's pages lie in the file of pages."""
    flags = number_of(entry, _FLAGS)
    if flags is None:
        raise ImageFormatError("has an entry without flags")
    return bool(flags & _PRESENT)
