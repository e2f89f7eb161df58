"""Answers match their form entirely, at both depths and beside other requests."""

import json
import re

import pytest

from nagara.engine.errors import RequestError
from nagara.engine.request import FinishReason, Guide, SamplingParams

pytest.importorskip("llguidance", reason="structured output needs llguidance")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def text_of(engine, heard):
    ids = heard.all()
    assert heard.reason is FinishReason.STOP
    return engine.tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_matches_its_regular_expression_entirely(tiny, start_engine, ask, seed):
    engine = start_engine(tiny)
    form = Guide("regex", "(ab|c[0-9]){3}-🐎")
    params = SamplingParams(max_tokens=60, guide=form, seed=seed, temperature=2)
    others = [ask(engine, [5 + i], SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    heard = ask(engine, [5, 6], params)
    assert re.fullmatch("(ab|c[0-9]){3}-🐎", text_of(engine, heard))
    for other in others:
        other.all()


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_matches_its_json_schema(tiny, start_engine, ask, seed):
    engine = start_engine(tiny)
    params = SamplingParams(max_tokens=200, guide=Guide("json", SCHEMA), seed=seed)
    value = json.loads(text_of(engine, ask(engine, [5, 6], params)))
    assert value["name"] in ("fox", "dog")
    assert value["age"] <= 9


def test_a_form_survives_a_preemption(tiny, start_engine, ask):
    engine = start_engine(tiny, cache_tokens=96, max_concurrency=3)
    form = Guide("regex", "[a-f]{40}")
    params = SamplingParams(max_tokens=80, guide=form, temperature=0)
    heard = [ask(engine, [5 + i, 6], params) for i in range(3)]
    assert all(re.fullmatch("[a-f]{40}", text_of(engine, one)) for one in heard)


@pytest.mark.parametrize("form", [Guide("regex", "(a"), Guide("json", '{"type": "nothing"}')])
def test_a_form_that_makes_no_sense_is_refused(tiny, start_engine, ask, form):
    with pytest.raises(RequestError):
        ask(start_engine(tiny), [5], SamplingParams(guide=form))
