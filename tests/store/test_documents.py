"""JSON from outside: what is none is refused, whatever the parser makes of it."""

import pytest

from nagara.store.documents import parse_json


@pytest.mark.parametrize(
    "text",
    ["Infinity", "-Infinity", "NaN", "1e999", '{"a": [-1e400]}', "[" * 100_000, "{", b"\xff"],
)
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_numbers_stay_what_they_are() -> None:
    assert parse_json('[1, -2.5, 1e300, 0.1, "Infinity"]') == [1, -2.5, 1e300, 0.1, "Infinity"]
