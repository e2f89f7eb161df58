import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.snapshot.criu_images import (
    Field,
    ImageFile,
    ImageFormatError,
    encode_message,
    number_of,
    parse_message,
)

HEAD = struct.pack("<II", 0x54564319, 0x56084025)

varints = st.builds(Field, st.integers(1, 500), st.just(0), st.integers(0, 2**64 - 1))
texts = st.builds(Field, st.integers(1, 500), st.just(2), st.binary(max_size=300))
fixed = st.builds(Field, st.integers(1, 500), st.just(5), st.binary(min_size=4, max_size=4))
wide = st.builds(Field, st.integers(1, 500), st.just(1), st.binary(min_size=8, max_size=8))


@given(st.lists(varints | texts | fixed | wide).map(tuple))
def test_what_is_written_is_read_back(fields: tuple[Field, ...]) -> None:
    assert parse_message(encode_message(fields)) == fields


@given(st.lists(st.binary(max_size=200)).map(tuple))
def test_files_keep_head_and_messages(messages: tuple[bytes, ...]) -> None:
    assert ImageFile.parse(ImageFile(HEAD, messages).content()) == ImageFile(HEAD, messages)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_or_read_and_nothing_else(content: bytes) -> None:
    for parse in (ImageFile.parse, parse_message):
        try:
            parse(content)
        except ImageFormatError as error:
            assert str(error)  # noqa: PT017 - any other exception fails the test


@pytest.mark.parametrize("cut", [3, 8, 10, 14])
def test_a_file_that_was_cut_is_refused(cut: int) -> None:
    content = ImageFile(HEAD, (b"\x08\x01", b"\x08\x02")).content()
    whole_messages = {8: 0, 14: 1}
    if cut in whole_messages:
        assert len(ImageFile.parse(content[:cut]).messages) == whole_messages[cut]
    else:
        with pytest.raises(ImageFormatError):
            ImageFile.parse(content[:cut])


def test_of_a_repeated_number_the_last_counts() -> None:
    fields = (Field(4, 0, 1), Field(5, 2, b"x"), Field(4, 0, 2))
    assert number_of(fields, 4) == 2
    assert number_of(fields, 5) is None
    assert number_of(fields, 6) is None
