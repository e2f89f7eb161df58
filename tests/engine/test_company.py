"""Many requests share one engine: places, refusals, and faults that stay their owner's."""

import logging

import pytest
from engine_cases import greedy, held_step

from nagara.engine.errors import OverloadedError, RequestError
from nagara.engine.request import FinishReason, Guide, SamplingParams


def test_too_many_waiting_requests_are_refused_also_in_a_burst(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=1, max_waiting=2)
    with held_step(engine):  # what comes meanwhile is not seen by the step thread yet
        heard = [ask(engine, [5], greedy(2)) for _ in range(3)]
        for _ in range(5):
            with pytest.raises(OverloadedError):
                ask(engine, [5], greedy(2))
    assert [len(one.all()) for one in heard] == [2, 2, 2]
    assert len(ask(engine, [5], greedy(2)).all()) == 2


def test_a_cancelled_request_gives_its_place_to_another(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=1, max_waiting=1)
    for _ in range(5):
        heard = [ask(engine, [5], greedy(400)) for _ in range(2)]
        for one in heard:
            engine.cancel(one.key)
        for one in heard:
            one.all()


def test_a_cancel_is_answered_though_a_step_is_under_way(tiny, start_engine, ask):
    engine = start_engine(tiny)
    heard = ask(engine, [5], greedy(400))
    heard.next()
    engine.cancel(heard.key)
    heard.all()
    assert heard.reason is FinishReason.CANCELLED
    assert len(heard.tokens) < 400


def test_generate_takes_more_prompts_than_may_wait(tiny, start_engine):
    engine = start_engine(tiny, max_concurrency=2, max_waiting=4)
    outputs = engine.generate([[5 + i] for i in range(50)], greedy(3))
    assert [len(output.token_ids) for output in outputs] == [3] * 50
    assert outputs[7] == engine.generate([[12]], greedy(3))[0]


def test_generate_is_refused_where_others_hold_every_place_and_leaves_nothing(
    tiny, start_engine, ask
):
    engine = start_engine(tiny, max_concurrency=1, max_waiting=1)
    others = [ask(engine, [5], greedy(400)) for _ in range(2)]
    with pytest.raises(OverloadedError):
        engine.generate([[5], [6]], greedy(1))
    for one in others:
        engine.cancel(one.key)
        one.all()
    assert len(engine.generate([[5], [6]], greedy(1))) == 2


def test_a_processor_that_fails_ends_its_own_request_alone(tiny, start_engine, ask):
    engine = start_engine(tiny)
    calls = []

    def fails_later(seen, logits):
        calls.append(seen)
        if len(seen) > 3:
            raise ZeroDivisionError("its own fault")
        return logits

    def of_another_shape(seen, logits):
        return logits[:-1]

    others = [ask(engine, [7 + i], greedy(20)) for i in range(6)]
    bad = ask(engine, [5, 6], greedy(20, logits_processors=(fails_later,)))
    worse = ask(engine, [5, 6], greedy(20, logits_processors=(of_another_shape,)))
    with pytest.raises(RequestError, match="its own fault"):
        bad.all()
    assert (len(bad.tokens), len(calls)) == (2, 3)
    with pytest.raises(RequestError, match="a logits processor failed"):
        worse.all()
    assert [len(one.all()) for one in others] == [20] * 6


def test_a_receiver_that_fails_ends_its_own_request_alone(tiny, start_engine, ask):
    engine = start_engine(tiny)
    logging.getLogger("nagara.engine").setLevel(logging.CRITICAL)
    told = []

    def receiver(event):
        told.append(event)
        raise ZeroDivisionError

    engine.submit([5], greedy(200), receiver)
    assert len(ask(engine, [6], greedy(20)).all()) == 20
    assert len(told) == 1
    assert engine.stats().running == 0


def test_a_form_goes_with_no_rule_about_where_the_answer_ends():
    form = Guide("regex", "a")
    for more in ({"min_tokens": 5}, {"ignore_eos": True}):
        with pytest.raises(RequestError, match="the form says where it ends"):
            SamplingParams(guide=form, **more)


async def test_a_stream_that_nobody_listens_to_any_more_is_cancelled(tiny, start_engine):
    engine = start_engine(tiny, max_concurrency=1, max_waiting=1)
    for _ in range(4):
        stream = engine.stream("the", greedy(400))
        del stream
    assert [p async for p in engine.stream("the", greedy(1))][-1].completion_tokens == 1
