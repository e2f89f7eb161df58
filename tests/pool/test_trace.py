"""Claims out of a recorded trace, by vectors worked out by hand."""

import pytest

from nagara.base.errors import UsageError
from nagara.pool.simulate.trace import IDLE_S, SLOTS, claims_of, read_trace

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,100,100
"""


def test_both_forms_of_a_trace_are_read() -> None:
    assert read_trace(CSV.splitlines(), "t.csv") == [(0.0, 1.3), (2.0, 4.0)]
    lines = ['{"timestamp": 3000, "input_length": 1, "output_length": 100}',
             '{"timestamp": 1000, "input_length": 1, "output_length": 0}']  # fmt: skip
    assert read_trace(lines, "t.jsonl") == [(0.0, 1.0), (2.0, 4.0)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,GeneratedTokens\n"])
def test_what_is_no_trace_is_said(text: str) -> None:
    with pytest.raises(UsageError, match=r"t\.csv"):
        read_trace(text.splitlines(), "t.csv")


def test_a_replica_is_opened_for_each_request_that_finds_no_slot() -> None:
    together = [(0.0, 10.0)] * (SLOTS + 1)
    assert [(one.at_s, one.hold_s) for one in claims_of(together)] == [(0.0, 10.0 + IDLE_S)] * 2


def test_a_slot_that_is_free_again_is_used_and_keeps_its_replica() -> None:
    (claim,) = claims_of([(0.0, 1.0), (50.0, 1.0), (100.0, 1.0)])
    assert (claim.at_s, claim.hold_s) == (0.0, 101.0 + IDLE_S)


def test_a_replica_that_was_given_back_serves_no_more() -> None:
    claims = claims_of([(0.0, 1.0), (100.0, 1.0)])
    assert [(one.at_s, one.hold_s) for one in claims] == [(0.0, 61.0), (100.0, 61.0)]
