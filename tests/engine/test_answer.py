"""Pieces are whole characters, end before a stop string, and add up to the answer."""

import pytest

from nagara.engine.answer import AnswerBuilder
from nagara.engine.events import TokenEvent
from nagara.engine.request import FinishReason, SamplingParams, TokenLogprob
from nagara.engine.tokenizer import StopFinder, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer(tiny)


def build(tokenizer, ids, reason=FinishReason.LENGTH, **params):
    """Push ids until the end; returns the pieces."""
    builder = AnswerBuilder(tokenizer, SamplingParams(**params), 1)
    pieces = []
    for i, token in enumerate(ids):
        last = reason if i == len(ids) - 1 else None
        pieces.append(
            builder.take(
                TokenEvent(token, TokenLogprob(token, -float(i)), last, last is FinishReason.STOP)
            )
        )
        if builder.finish_reason is not None:
            break
    return pieces


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def ids_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize("text", ["the lazy dog", "ながら means while", "kůň 🐎🐎 同時", " a  b "])
def test_pieces_add_up_to_the_text_and_hold_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = build(tokenizer, ids)
    assert text_of(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert ids_of(pieces) == ids


def test_an_answer_cut_inside_a_character_shows_the_replacement_at_its_end(tokenizer):
    ids = tokenizer.encode("🐎")
    assert len(ids) > 1
    assert text_of(build(tokenizer, ids[:-1])) == "\ufffd"


@pytest.mark.parametrize("stop", ["lazy", "y d", "the lazy", "zy dog", "g"])
def test_text_ids_and_logprobs_end_together_before_a_stop_string(tokenizer, stop):
    text = "the lazy dog barks"
    ids = tokenizer.encode(text)
    pieces = build(tokenizer, ids, stop=(stop,))
    assert text_of(pieces) == text[: text.index(stop)]
    assert pieces[-1].finish_reason is FinishReason.STOP
    kept = ids_of(pieces)
    assert ids[: len(kept)] == kept
    assert len([p for piece in pieces for p in piece.logprobs]) == len(kept)
    begun = tokenizer.decode(kept)
    assert begun.startswith(text_of(pieces))
    assert not kept or len(tokenizer.decode(kept[:-1])) < len(text_of(pieces))


def test_a_stop_string_made_of_part_characters_is_found(tokenizer):
    ids = tokenizer.encode("fox 🐎 dog")
    assert text_of(build(tokenizer, ids, stop=("🐎",))) == "fox "


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(tokenizer):
    ids = tokenizer.encode("the lazy do")
    pieces = build(tokenizer, ids, stop=("dog",))
    assert text_of(pieces) == "the lazy do"
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_the_end_token_is_counted_and_not_shown(tokenizer):
    ids = [*tokenizer.encode("dog"), 2]
    pieces = build(tokenizer, ids, reason=FinishReason.STOP)
    assert text_of(pieces) == "dog"
    assert ids_of(pieces) == ids[:-1]
    assert pieces[-1].completion_tokens == len(ids)


def test_the_earliest_of_several_stop_strings_wins():
    finder = StopFinder(("cd", "b"))
    assert finder.push("abcd") == "a"
    assert finder.is_found
    assert finder.push("more") == ""


def test_a_stop_string_that_repeats_its_own_beginning_is_found():
    finder = StopFinder(("aab",))
    assert finder.push("aa") == ""
    assert finder.push("a") == "a"
    assert finder.push("b") == ""
    assert finder.is_found
