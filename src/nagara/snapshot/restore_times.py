"""Where the checkpoint tool's time went in a restore, as its own log tells. Pure.

The log is CRIU's at the level that runc asks of it: each line begins with the seconds since the
tool's start, `(00.067377) pie: 1: Preadv ...`. Of each process it shows

    Opened local page read     →  first "Read"        the address space is laid out
    first "Read"               →  nr_restored_pages   pages that it shares with its parent are read
    Switched to the restorer   →  Preadv              mappings are put where they belong
    Preadv                     →  `- returned         its other pages are read

Processes are restored at the same time: what at least one of them spends on reading is reading,
and of the rest what at least one spends on mapping is mapping.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEAD = re.compile(rb"\((\d+\.\d+)\) +(?:(?:pie: )?(\d+): )?")
_MAP, _READ = "map", "read"
_BEGINS = {
    b": Opened local page read": _MAP,
    b": nr_restored_pages": None,
    b": Switched to the restorer": _MAP,
    b": Preadv": _READ,
    b": `- returned": None,
    b": Restoring scheduler": None,
}
_FIRST_READ = re.compile(rb"^\((\d+\.\d+)\) +(\d+): [ \t]*(?:Read piov|pr\d+-\d+ Read )", re.M)
_NEAR = 1 << 20  # the first read of a process follows its mapping within so many bytes

Interval = tuple[float, float]
Mark = tuple[int, float, bytes, str | None]


@dataclass(frozen=True, slots=True)
class RestoreTimes:
    """Seconds of the tool's run: all of them, and the parts spent on reading and mapping."""

    total_s: float
    read_s: float
    map_s: float


def restore_times(log: bytes) -> RestoreTimes:
    """What a log tells; zeros where it tells nothing."""
    spent: dict[str, list[Interval]] = {_MAP: [], _READ: []}
    doing: dict[bytes, tuple[str, float]] = {}
    for _, now_s, process, begins in _marks(log):
        if process in doing:
            was, since_s = doing.pop(process)
            spent[was].append((since_s, now_s))
        if begins is not None:
            doing[process] = (begins, now_s)
    read_s = _covered(spent[_READ])
    map_s = _covered(spent[_MAP] + spent[_READ]) - read_s
    return RestoreTimes(_last_s(log), read_s, map_s)


def _marks(log: bytes) -> list[Mark]:
    """In the log's order: where, when, which process, and what it begins to do.

    The log of a forking server has tens of thousands of lines, of which these few are looked for.
    """
    found: list[Mark] = []
    for words, begins in _BEGINS.items():
        at = log.find(words)
        while at >= 0:
            line = log.rfind(b"\n", 0, at) + 1
            if (head := _HEAD.match(log, line)) and head[2]:
                found.append((line, float(head[1]), head[2], begins))
                if words == b": Opened local page read":
                    found += _first_read(log, at, head[2])
            at = log.find(words, at + 1)
    return sorted(found, key=lambda mark: mark[0])


def _first_read(log: bytes, begin: int, process: bytes) -> list[Mark]:
    for read in _FIRST_READ.finditer(log, begin, begin + _NEAR):
        if read[2] == process:
            return [(read.start(), float(read[1]), process, _READ)]
    return []  # all its pages are its own: they are read later


def _last_s(log: bytes) -> float:
    """The time of the last line that has one."""
    end = len(log)
    while end > 0:
        begin = log.rfind(b"\n", 0, end) + 1
        if head := _HEAD.match(log, begin):
            return float(head[1])
        end = begin - 1
    return 0.0


def _covered(intervals: Iterable[Interval]) -> float:
    """Seconds that lie in at least one of the intervals."""
    covered_s, until_s = 0.0, 0.0
    for begin_s, end_s in sorted(intervals):
        begin_s = max(begin_s, until_s)
        if end_s > begin_s:
            covered_s += end_s - begin_s
            until_s = end_s
    return covered_s
