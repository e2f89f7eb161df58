"""Calls are taken out of the text however it is cut; what is no call stays text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.engine.tools import ToolCall, ToolCallParser

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "fox"}}\n</tool_call>'


def parse(*pieces):
    parser = ToolCallParser()
    parsed = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(p.text for p in parsed), [call for p in parsed for call in p.calls]


def test_a_call_is_taken_out_and_text_around_it_stays():
    text, calls = parse("I look. " + CALL)
    assert text == "I look. "
    assert calls == [ToolCall("look", '{"at": "fox"}')]


def test_several_calls_are_kept_in_order_without_the_breaks_between_them():
    text, calls = parse(CALL + "\n" + CALL.replace("look", "see"))
    assert text == ""
    assert [call.name for call in calls] == ["look", "see"]


@given(st.lists(st.integers(0, len(CALL)), max_size=5))
def test_cuts_do_not_matter(cuts):
    whole = "a <b " + CALL
    places = [0, *sorted(cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert parse(*pieces) == ("a <b ", [ToolCall("look", '{"at": "fox"}')])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "never closed"}',
        "<tool_cal",
    ],
)
def test_what_is_no_call_is_given_out_unchanged(text):
    assert parse(*text) == (text, [])


def test_arguments_are_always_json_text():
    _, calls = parse('<tool_call>{"name": "f"}</tool_call>')
    assert json.loads(calls[0].arguments) == {}


@pytest.mark.parametrize("inside", ["9" * 5000, "[" * 100_000, '{"name": ' + "9" * 5000 + "}"])
def test_what_ends_the_json_parser_is_no_call(inside):
    text = f"<tool_call>{inside}</tool_call>"
    assert parse(text) == (text, [])
