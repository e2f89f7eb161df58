import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.image.errors import BadTraceError
from nagara.image.trace import (
    MEMBER_LIMIT_BYTES,
    PACK_BYTES,
    Pack,
    Trace,
    from_touches,
    merge,
    plan_packs,
    read_trace,
    touches_of,
    write_trace,
)
from nagara.store.names import CHUNK_BYTES, ObjectName

_LARGE = 100 << 20


def name(number: int, size: int = 1000) -> ObjectName:
    return ObjectName(bytes([number]) * 32, size)


def test_each_touch_stands_once_where_it_came_first() -> None:
    large = name(9, _LARGE)
    touches = [(name(2), 0), (large, 7), (large, 4), (name(1), 0), (large, 3)]
    trace = from_touches([*touches, (name(2), 0), (large, 7)])
    assert trace.objects == ((name(2), ()), (large, (7, 4)), (name(1), ()), (large, (3,)))
    assert list(touches_of(trace)) == touches


def test_a_merged_trace_has_all_of_both_and_the_newer_order() -> None:
    large = name(9, _LARGE)
    older = Trace(((name(1), ()), (name(2), ()), (large, (1, 2))), (Pack(name(5), ()),))
    newer = Trace(((large, (4, 2)), (name(3), ()), (name(1), ())))
    assert merge(older, newer) == Trace(
        ((large, (4, 2)), (name(3), ()), (name(1), ()), (name(2), ()), (large, (1,)))
    )


def test_packs_keep_the_order_and_their_bound_and_leave_large_objects_out() -> None:
    names = [name(number, MEMBER_LIMIT_BYTES) for number in range(40)]
    names.insert(3, name(200, MEMBER_LIMIT_BYTES + 1))
    packs = plan_packs(Trace(tuple((each, ()) for each in names)))
    assert [each for pack in packs for each in pack] == [n for n in names if n != names[3]]
    assert all(sum(each.size for each in pack) <= PACK_BYTES for pack in packs)
    assert plan_packs(Trace(((name(1), ()),))) == []  # alone it needs no pack


_names = st.builds(ObjectName, st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    objects = []
    for each in draw(st.lists(_names, max_size=10)):
        count = each.chunk_count if each.is_chunked else 0
        chunks = draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []
        objects.append((each, tuple(chunks)))
    sizes = draw(st.lists(st.integers(0, 1000), max_size=10))
    members, offset = [], 0
    for number, size in enumerate(sizes):
        members.append((name(number, size), offset))
        offset += size + draw(st.integers(0, 10))
    return Trace(tuple(objects), (Pack(name(99, offset), tuple(members)),))


@given(traces())
def test_a_trace_is_read_back_as_it_was_written(trace: Trace) -> None:
    assert read_trace(write_trace(trace)) == trace


def document(**changed: Any) -> dict[str, Any]:
    return {"version": 1, "objects": [], "packs": [], **changed}


def pack(*members: Any, size: int = 1000) -> dict[str, Any]:
    return {"object": str(name(1, size)), "members": list(members)}


@pytest.mark.parametrize(
    "crafted",
    [
        [], "x", None, {}, document(version=2), document(objects=None), document(packs={"a": 1}),
        document(objects=[["../../etc/passwd", []]]),
        document(objects=[[str(name(1)) + "/..", []]]),
        document(objects=[[str(name(1)).upper(), []]]),
        document(objects=[[str(name(1)), [0]]]),
        document(objects=[[str(name(1, _LARGE)), [_LARGE // CHUNK_BYTES + 1]]]),
        document(objects=[[str(name(1, _LARGE)), [-1]]]),
        document(objects=[[str(name(1, _LARGE)), [True]]]),
        document(objects=[[str(name(1, _LARGE)), [1.0]]]),
        document(objects=[[str(name(1)), [], []]]),
        document(packs=[pack([str(name(2, 10)), 991])]),
        document(packs=[pack([str(name(2, 10)), -1])]),
        document(packs=[pack([str(name(2, 10)), 0.0])]),
        document(packs=[pack([str(name(2, 10)), 5], [str(name(3, 10)), 14])]),
        document(packs=[pack(size=(64 << 20) + 1)]),
        document(packs=[pack([str(name(2, MEMBER_LIMIT_BYTES + 1)), 0], size=32 << 20)]),
    ],
)  # fmt: skip
def test_a_crafted_trace_is_refused(crafted: Any) -> None:
    with pytest.raises(BadTraceError):
        read_trace(json.dumps(crafted).encode())


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadTraceError):
        read_trace(b"[" * 1_000_000)


@given(traces(), st.data())
def test_a_damaged_trace_is_read_or_refused_and_nothing_else(
    trace: Trace, data: st.DataObject
) -> None:
    raw = bytearray(write_trace(trace))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_trace(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    except BadTraceError:
        return
