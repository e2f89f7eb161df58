"""Tokens are counted while answers pass, however they are cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.control.token_tally import TokenTally

JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}
ANSWER = b'{"choices":[{"text":"a b c"}],"usage":{"prompt_tokens":4,"completion_tokens":123}}\n'
EVENTS = b"".join(b'data: {"choices":[{"text":"x"}]}\n\n' for _ in range(5))
USAGE = b'data: {"choices":[],"usage":{"completion_tokens": 17}}\n\n'
END = b"data: [DONE]\n\n"


def tally(headers: dict[str, str], text: bytes, cuts: list[int]) -> int:
    counter, total = TokenTally(headers), 0
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in itertools.pairwise(borders):
        total += counter.take(text[begin:end])
    return total


@given(cuts=st.lists(st.integers(0, 300), max_size=12))
@pytest.mark.parametrize(
    ("headers", "text", "tokens"),
    [
        (JSON, ANSWER, 123),
        (STREAM, EVENTS + END, 5),
        (STREAM, EVENTS + USAGE + END, 17),
        ({"Content-Type": "text/html"}, ANSWER, 0),
        ({**JSON, "Content-Encoding": "gzip"}, ANSWER, 0),
    ],
)
def test_the_count_does_not_depend_on_the_pieces(
    headers: dict[str, str], text: bytes, tokens: int, cuts: list[int]
) -> None:
    assert tally(headers, text, cuts) == tokens
