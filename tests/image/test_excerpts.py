"""Which stretches of which objects go together, and that nothing malformed is believed."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from nagara.image.errors import BadTraceError
from nagara.image.excerpts import (
    STRETCH_BYTES,
    Excerpts,
    is_worth,
    make_excerpts,
    parse_excerpts,
    plain_excerpts,
    runs_of,
    stretch_bytes,
)
from nagara.image.trace import NO_TRACE, Trace, parse_touches, plain_touches, whole, without
from nagara.image.tracing import touches_of_stretches
from nagara.store.local import ObjectFolder
from nagara.store.names import CHUNK_BYTES, ObjectName, name_bytes
from nagara.store.store import Store
from nagara.testing.objects import noise

MEGABYTE = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Any:
    objects = ObjectFolder(tmp_path / "store")
    made = Store(objects.tenant("default"))
    yield made
    made.close()
    objects.close()


def name_of(size: int, seed: int = 0) -> ObjectName:
    return ObjectName(name_bytes(f"{seed}".encode()).digest, size)


@pytest.mark.parametrize("seed", range(20))
def test_runs_hold_each_stretch_once_in_order_and_no_object_is_too_long(seed: int) -> None:
    draw = random.Random(seed)
    members = []
    for number in range(draw.randrange(1, 30)):
        size = draw.randrange(1, 3 * CHUNK_BYTES)
        count = -(-size // STRETCH_BYTES)
        members.append((
            name_of(size, number),
            tuple(sorted(draw.sample(range(count), draw.randrange(1, count + 1)))),
        ))  # fmt: skip
    runs = runs_of(tuple(members))
    for name, numbers in members:
        held = [at for run in runs[name] for at in range(run.start, run.start + run.length)[::4096]]
        wanted = [
            at
            for number in numbers
            for at in range(number * STRETCH_BYTES, (number + 1) * STRETCH_BYTES, 4096)
            if at < name.size
        ]
        assert held == wanted
        assert all(run.start % STRETCH_BYTES == 0 for run in runs[name])
        assert all(0 < run.length <= MEGABYTE for run in runs[name])
    filled = dict[int, int]()
    for run in chain.from_iterable(runs.values()):
        assert run.offset == filled.get(run.place, 0), "a gap, or bytes held twice"
        filled[run.place] = run.offset + run.length
    assert sorted(filled) == list(range(len(filled)))
    assert max(filled.values()) <= CHUNK_BYTES


def test_an_excerpt_pays_where_little_is_read_of_what_would_be_fetched() -> None:
    library, weights = name_of(30 * MEGABYTE), name_of(100 * MEGABYTE)
    assert weights.is_chunked
    assert not library.is_chunked
    assert is_worth(library, range(10))
    assert not is_worth(library, range(300))
    assert is_worth(name_of(MEGABYTE), range(16)), "small, and so fetched with the others"
    per_chunk = CHUNK_BYTES // STRETCH_BYTES
    assert is_worth(weights, (0, per_chunk, 2 * per_chunk))
    assert not is_worth(weights, range(3 * per_chunk))


def test_excerpts_hold_what_the_objects_have_there(store: Store) -> None:
    contents = {name: noise(size, number) for number, size in enumerate(
        (5 * MEGABYTE, 70_000, 6 * MEGABYTE + 5)) for name in [str(number)]}  # fmt: skip
    names = {store.put_bytes(content): content for content in contents.values()}
    asked = {name: [number for number in range(200) if stretch_bytes(name, number) > 0][::-1]
             for name in names}  # fmt: skip
    excerpts = make_excerpts(store, asked)
    assert excerpts is not None
    assert len(excerpts.objects) == 3
    assert sum(each.size for each in excerpts.objects) == sum(map(len, contents.values()))
    kept = [store.read(each) for each in excerpts.objects]
    for name, runs in runs_of(excerpts.members).items():
        for start, length, place, offset in runs:
            assert kept[place][offset : offset + length] == names[name][start : start + length]
    assert parse_excerpts(plain_excerpts(excerpts)) == excerpts


def test_nothing_read_makes_no_excerpts(store: Store) -> None:
    assert make_excerpts(store, {}) is None
    assert plain_excerpts(None) is None
    assert parse_excerpts(None) is None


def test_what_starts_elsewhere_fetch_is_excerpts_and_then_what_is_read_whole(store: Store) -> None:
    library, weights = store.put_bytes(noise(5 * MEGABYTE)), store.put_bytes(noise(65 * MEGABYTE))
    read = {weights: [*range(130)], library: [3, 0, 3]}
    touches = touches_of_stretches(store, read)
    assert touches.objects == ((weights, (0, 1, 2)),)
    assert touches.excerpts is not None
    assert touches.excerpts.members == ((library, (0, 3)),)
    [source] = touches.excerpts.objects
    assert source.size == 2 * STRETCH_BYTES
    assert parse_touches(plain_touches(touches)) == touches
    everything = Trace((whole(source), *touches.objects), excerpts=touches.excerpts)
    assert without(touches, lambda name: False) == everything
    assert without(touches, {source}.__contains__) == touches
    assert without(touches, {library}.__contains__) == Trace(touches.objects)
    assert without(touches, {library, weights}.__contains__) == NO_TRACE


def test_where_nothing_may_be_excerpted_all_that_was_read_is_fetched(store: Store) -> None:
    library = store.put_bytes(noise(5 * MEGABYTE))
    assert touches_of_stretches(store, {library: [3]}, may_excerpt=False) == Trace(
        (whole(library),)
    )


GOOD = {
    "objects": [str(name_of(2 * STRETCH_BYTES - 7))],
    "members": [[str(name_of(MEGABYTE, 1)), [2]], [str(name_of(STRETCH_BYTES - 7, 2)), [0]]],
}


def test_a_good_one_is_read() -> None:
    found = parse_excerpts(GOOD)
    assert isinstance(found, Excerpts)
    assert [numbers for _, numbers in found.members] == [(2,), (0,)]


MEMBER = str(name_of(MEGABYTE, 1))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("objects", []),
        ("objects", [str(name_of(2 * STRETCH_BYTES))]),
        ("objects", [str(name_of(STRETCH_BYTES)), str(name_of(STRETCH_BYTES - 7, 3))]),
        ("objects", "no list"),
        ("objects", [7]),
        ("members", []),
        ("members", [[MEMBER, [2]], [MEMBER, [3]]]),
        ("members", [[MEMBER, []]]),
        ("members", [[MEMBER, [3, 2]]]),
        ("members", [[MEMBER, [2, 2]]]),
        ("members", [[MEMBER, [16]]]),
        ("members", [[MEMBER, [-1]]]),
        ("members", [[MEMBER, [True]]]),
        ("members", [[MEMBER, "01"]]),
        ("members", [["../etc", [0]]]),
        ("members", [[MEMBER]]),
        ("members", 5),
    ],
)
def test_what_is_malformed_is_refused(part: str, value: Any) -> None:
    with pytest.raises(BadTraceError):
        parse_touches({"objects": [], "excerpts": {**GOOD, part: value}})
