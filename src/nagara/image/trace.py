"""Access traces: what the first starts of an image touched, in order. Pure.

    {"version": 1, "objects": [[NAME, [CHUNK, ...]], ...], "packs": [PACK, ...]}
    PACK = {"object": NAME, "members": [[NAME, OFFSET], ...]}

A pack is an object that consists of small objects in the order of the trace: a start from far
away is then a few large reads. A trace comes from outside: it is only ever a hint about what to
fetch, every byte of it is proven by the members' own names, and what is malformed is refused.
"""

import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nagara.image.errors import BadTraceError
from nagara.image.excerpts import Excerpts, parse_excerpts, plain_excerpts
from nagara.image.recorder import Touch
from nagara.store.documents import parse_json
from nagara.store.errors import BadNameError
from nagara.store.names import WHOLE_LIMIT_BYTES, ObjectName, parse_name

VERSION = 1
TRACE_LIMIT_BYTES = 256 << 20
# Larger ones gain nothing from a pack: their own reads are long enough.
MEMBER_LIMIT_BYTES = 1 << 20
PACK_BYTES = 16 << 20
_COUNT_LIMIT = 2_000_000


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack and where its members begin in it."""

    name: ObjectName
    members: tuple[tuple[ObjectName, int], ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What to fetch, in order; `chunks` of a small object is empty.

    A large object stands there as often as other ones were touched between its chunks.
    """

    objects: tuple[tuple[ObjectName, tuple[int, ...]], ...]
    packs: tuple[Pack, ...] = ()
    excerpts: Excerpts | None = None  # of objects that are not fetched themselves


NO_TRACE = Trace(())


def from_touches(touches: Iterable[Touch]) -> Trace:
    """A trace of one recording: each touch once, where it came first."""
    found: list[tuple[ObjectName, list[int]]] = []
    for name, chunk in dict.fromkeys(touches):
        if not name.is_chunked:
            found.append((name, []))
        elif found and found[-1][0] == name:
            found[-1][1].append(chunk)
        else:
            found.append((name, [chunk]))
    return Trace(tuple((name, tuple(chunks)) for name, chunks in found))


def touches_of(trace: Trace) -> Iterator[Touch]:
    """The inverse of `from_touches`."""
    for name, chunks in trace.objects:
        for chunk in chunks or (0,):
            yield name, chunk


def merge(older: Trace, newer: Trace) -> Trace:
    """Everything of both, the newer one's order first. Packs are made anew afterwards."""
    return from_touches(itertools.chain(touches_of(newer), touches_of(older)))


def within(trace: Trace, listed: Container[ObjectName]) -> Trace:
    """What of a trace is an image's own: a trace from outside shall fetch nothing else."""
    return Trace(
        tuple(each for each in trace.objects if each[0] in listed),
        tuple(
            replace(pack, members=tuple(each for each in pack.members if each[0] in listed))
            for pack in trace.packs
        ),
    )


def whole(name: ObjectName) -> tuple[ObjectName, tuple[int, ...]]:
    """All of an object, as it stands in a trace."""
    return name, tuple(range(name.chunk_count)) if name.is_chunked else ()


def without(trace: Trace, is_here: Callable[[ObjectName], bool]) -> Trace:
    """What of a trace is not here. Excerpts of which any is needed come first."""
    objects = [each for each in trace.objects if not is_here(each[0])]
    excerpts = trace.excerpts
    if excerpts is None or all(is_here(name) for name, _ in excerpts.members):
        return Trace(tuple(objects))
    sources = [whole(name) for name in excerpts.objects if not is_here(name)]
    return Trace((*sources, *objects), excerpts=excerpts)


def plan_packs(trace: Trace) -> list[list[ObjectName]]:
    """Which objects go together into packs, in the order of the trace."""
    packs: list[list[ObjectName]] = [[]]
    used = 0
    for name, _ in trace.objects:
        if name.size > MEMBER_LIMIT_BYTES:
            continue
        if used + name.size > PACK_BYTES and packs[-1]:
            packs.append([])
            used = 0
        packs[-1].append(name)
        used += name.size
    return [pack for pack in packs if len(pack) > 1]


def plain_objects(trace: Trace) -> list[Any]:
    """What to fetch, in order, as JSON values."""
    return [[str(name), list(chunks)] for name, chunks in trace.objects]


def parse_objects(plain: Iterable[Any]) -> Trace:
    """The inverse of `plain_objects`. Raises `BadTraceError` for anything else."""
    try:
        objects = tuple(_object(entry) for entry in plain)
    except (ValueError, KeyError, TypeError, AttributeError, BadNameError) as error:
        raise BadTraceError(f"is no trace: {type(error).__name__}: {error}"[:200]) from error
    if len(objects) > _COUNT_LIMIT:
        raise BadTraceError("names too many objects")
    return Trace(objects)


def plain_touches(trace: Trace) -> dict[str, Any]:
    """A trace of what is put back, as JSON values."""
    return {"objects": plain_objects(trace), "excerpts": plain_excerpts(trace.excerpts)}


def parse_touches(plain: Any) -> Trace:
    """The inverse of `plain_touches`. Raises `BadTraceError` for anything else."""
    try:
        found = parse_objects(plain["objects"])
        return replace(found, excerpts=parse_excerpts(plain["excerpts"]))
    except (ValueError, KeyError, TypeError, AttributeError, BadNameError) as error:
        raise BadTraceError(f"is no trace: {type(error).__name__}: {error}"[:200]) from error


def write_trace(trace: Trace) -> bytes:
    """The stored form."""
    document = {
        "version": VERSION,
        "objects": plain_objects(trace),
        "packs": [
            {"object": str(pack.name), "members": [[str(n), at] for n, at in pack.members]}
            for pack in trace.packs
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def read_trace(raw: bytes) -> Trace:
    """The inverse of `write_trace`. Raises `BadTraceError` for anything else."""
    if len(raw) > TRACE_LIMIT_BYTES:
        raise BadTraceError("is too large for a trace")
    try:
        document = parse_json(raw)
        if document["version"] != VERSION:
            raise BadTraceError(f"has version {document['version']!r}")
        packs = tuple(_pack(entry) for entry in document["packs"])
        return replace(parse_objects(document["objects"]), packs=packs)
    except (ValueError, KeyError, TypeError, AttributeError, BadNameError) as error:
        raise BadTraceError(f"is no trace: {type(error).__name__}: {error}"[:200]) from error


def _object(entry: Sequence[Any]) -> tuple[ObjectName, tuple[int, ...]]:
    text, chunks = entry
    name = parse_name(text)
    count = name.chunk_count if name.is_chunked else 0
    if not all(type(chunk) is int and 0 <= chunk < count for chunk in chunks):
        raise BadTraceError("names chunks that the object does not have")
    return name, tuple(chunks)


def _pack(entry: dict[str, Any]) -> Pack:
    name = parse_name(entry["object"])
    if name.size > WHOLE_LIMIT_BYTES:
        raise BadTraceError("a pack is too large")
    members = []
    end = 0
    for text, offset in entry["members"]:
        member = parse_name(text)
        if type(offset) is not int or offset < end or offset + member.size > name.size:
            raise BadTraceError("a pack's member lies outside of it")
        if member.size > MEMBER_LIMIT_BYTES:
            raise BadTraceError("a pack's member is too large")
        end = offset + member.size
        members.append((member, offset))
    return Pack(name, tuple(members))
