import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.store.errors import BadNameError
from nagara.store.names import (
    CHUNK_BYTES,
    WHOLE_LIMIT_BYTES,
    ChunkList,
    ObjectName,
    name_bytes,
    pack_names,
    parse_chunk_list,
    parse_name,
    unpack_names,
    zero_hash,
)

names = st.builds(ObjectName, st.binary(min_size=32, max_size=32), st.integers(0, (1 << 63) - 1))


@given(names)
def test_a_name_is_read_back_from_its_text(name: ObjectName) -> None:
    assert parse_name(str(name)) == name


@given(st.text(max_size=90))
def test_other_text_is_no_name(text: str) -> None:
    with contextlib.suppress(BadNameError):
        assert str(parse_name(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 52,
        "a" * 52 + ".",
        "a" * 52 + ".-1",
        "a" * 52 + ".01",
        "a" * 51 + "b.5",  # the spare bits are set: another spelling of the same digest
        "A" * 52 + ".5",
        "a" * 52 + ".9223372036854775808",
        "../" + "a" * 49 + ".5",
        "a" * 52 + ".5\n",
    ],
)
def test_only_one_spelling_of_a_name_is_one(text: str) -> None:
    with pytest.raises(BadNameError):
        parse_name(text)


def test_small_content_is_named_by_its_own_hash() -> None:
    assert name_bytes(b"abc") == ObjectName(hashlib.sha256(b"abc").digest(), 3)


def test_a_large_object_is_named_by_its_chunk_list_and_that_by_nothing_else() -> None:
    size = WHOLE_LIMIT_BYTES + 1
    name = name_bytes(bytes(size))
    chunks = ChunkList([zero_hash(CHUNK_BYTES)] * 16 + [zero_hash(1)], size)
    assert chunks.name == name
    assert name.is_chunked
    raw = chunks.to_bytes()
    assert parse_chunk_list(raw, name).hashes == chunks.hashes
    assert all(chunks.is_hole(index) for index in range(17))
    for bad in (raw[:-1], raw + b"x", b"x" + raw[1:], b""):
        with pytest.raises(BadNameError):
            parse_chunk_list(bad, name)
    # A small object that consists of the list's bytes has another size, hence another name.
    assert name_bytes(raw) != name


@given(st.lists(names, max_size=20))
def test_a_reference_list_is_sorted_and_without_duplicates(listed: list[ObjectName]) -> None:
    assert list(unpack_names(pack_names(listed))) == sorted(set(listed))


def test_a_cut_reference_list_is_refused() -> None:
    with pytest.raises(BadNameError):
        list(unpack_names(bytes(41)))
