"""Excerpts: what a start reads of files that it reads little of, together in a few objects.

A start that is put back reads some pages of each of its libraries. Elsewhere the libraries come
from far away, and whole or in chunks: many times what is read. So the stretches that were read
once are kept side by side, and who they belong to is told:

    {"objects": [NAME, ...], "members": [[NAME, [STRETCH, ...]], ...]}

The objects are as long as one read of a tier, so that they come and are verified side by side. No
hash of a member proves a stretch of it: an excerpt is believed as the memory is of the snapshot
that it belongs to. Pure but for `make_excerpts`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from nagara.image.recorder import Touch, touched_bytes
from nagara.store.errors import BadNameError
from nagara.store.names import CHUNK_BYTES, ObjectName, parse_name
from nagara.store.store import Store

STRETCH_BYTES = 64 << 10  # what the kernel maps at once around a page that is read
_OBJECT_BYTES = CHUNK_BYTES
_WORTH = 0.5  # of what would be fetched otherwise: an excerpt pays when it has less
_SMALL_BYTES = 1 << 20  # one long read is better than many short ones
_RUN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Excerpts:
    """Objects that hold the stretches of their members, one after the other, each in one piece."""

    objects: tuple[ObjectName, ...]
    members: tuple[tuple[ObjectName, tuple[int, ...]], ...]  # numbers ascend


class Run(NamedTuple):
    """Bytes that lie together in a member and in one of the objects."""

    start: int  # in the member
    length: int
    place: int  # the object's, among the objects
    offset: int  # in the object


def runs_of(members: tuple[tuple[ObjectName, tuple[int, ...]], ...]) -> dict[ObjectName, list[Run]]:
    """Where the bytes of each member are, in runs of a megabyte at most."""
    found: dict[ObjectName, list[Run]] = {}
    place = offset = 0
    for name, numbers in members:
        runs = found[name] = []
        for number in numbers:
            start, length = number * STRETCH_BYTES, stretch_bytes(name, number)
            if offset + length > _OBJECT_BYTES:
                place, offset = place + 1, 0
            last = runs[-1] if runs else None
            if (
                last
                and last.place == place
                and last.start + last.length == start
                and last.length + length <= _RUN_BYTES
            ):
                runs[-1] = last._replace(length=last.length + length)
            else:
                runs.append(Run(start, length, place, offset))
            offset += length
    return found


def stretch_bytes(name: ObjectName, number: int) -> int:
    """The length of an object's stretch; 0 or less for one that it does not have."""
    return min(STRETCH_BYTES, name.size - number * STRETCH_BYTES)


def touch_of(name: ObjectName, number: int) -> Touch:
    """What is fetched for an object's stretch where it has no excerpt."""
    return name, number * STRETCH_BYTES // CHUNK_BYTES if name.is_chunked else 0


def is_worth(name: ObjectName, numbers: Collection[int]) -> bool:
    """These stretches of an object are better kept as an excerpt than fetched with the object."""
    if name.size <= _SMALL_BYTES:
        return True
    fetched = sum(map(touched_bytes, {touch_of(name, number) for number in numbers}))
    return sum(stretch_bytes(name, number) for number in numbers) <= _WORTH * fetched


def make_excerpts(store: Store, stretches: Mapping[ObjectName, Collection[int]]) -> Excerpts | None:
    """Copies stretches of objects, given by their numbers, into objects of the store; None if
    there are none. What is not here is fetched. Blocking. Raises `StoreError`."""
    members = tuple((name, tuple(sorted(set(numbers)))) for name, numbers in stretches.items())
    if not members:
        return None
    objects: list[ObjectName] = []
    content = bytearray()
    for name, runs in runs_of(members).items():
        reader = store.open(name)
        for start, length, place, _ in runs:
            if place > len(objects):
                objects.append(store.put_bytes(bytes(content)))
                content.clear()
            piece = bytearray(length)
            reader.read_into(memoryview(piece), start, store.deadline(None))
            content += piece
    return Excerpts((*objects, store.put_bytes(bytes(content))), members)


def plain_excerpts(excerpts: Excerpts | None) -> dict[str, Any] | None:
    """As JSON values."""
    if excerpts is None:
        return None
    members = [[str(name), list(numbers)] for name, numbers in excerpts.members]
    return {"objects": [str(name) for name in excerpts.objects], "members": members}


def parse_excerpts(plain: Any) -> Excerpts | None:
    """The inverse of `plain_excerpts`. Raises ValueError, KeyError, TypeError, AttributeError or
    `BadNameError` for anything else."""
    if plain is None:
        return None
    members = tuple(_members(plain["members"]))
    found = Excerpts(tuple(map(parse_name, plain["objects"])), members)
    if len({name for name, _ in members}) != len(members):
        raise BadNameError("excerpts name an object twice")
    sizes: dict[int, int] = {}
    for run in chain.from_iterable(runs_of(members).values()):
        sizes[run.place] = run.offset + run.length
    if [sizes[place] for place in sorted(sizes)] != [name.size for name in found.objects]:
        raise BadNameError("excerpts are not as long as their stretches")
    return found


def _members(plain: Any) -> Iterator[tuple[ObjectName, tuple[int, ...]]]:
    for text, numbers in plain:
        name = parse_name(text)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise BadNameError("excerpts name stretches by something else than numbers")
        if numbers != sorted(set(numbers)) or not numbers or stretch_bytes(name, numbers[-1]) <= 0:
            raise BadNameError("excerpts name stretches that the object does not have")
        yield name, tuple(numbers)
