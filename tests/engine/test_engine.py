"""Tokens are those of transformers, whatever runs beside them; every request ends."""

import random

import pytest

from nagara.engine.errors import ContextLengthError, RequestError
from nagara.engine.request import FinishReason, SamplingParams

FAMILIES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"]


def prompts(count, low=1, high=60, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 400) for _ in range(draw.randint(low, high))] for _ in range(count)]


def greedy(new, **more):
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(
    family, make_model, start_engine, ask, reference
):
    folder = make_model(family)
    engine = start_engine(folder)
    for prompt in prompts(3):
        assert ask(engine, prompt, greedy(40)).all() == reference(folder, prompt, 40)


def test_greedy_tokens_of_smollm2_equal_those_of_transformers(
    smollm2, start_engine, ask, reference
):
    engine = start_engine(smollm2)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2]
    assert ask(engine, prompt, greedy(32)).all() == reference(smollm2, prompt, 32)


def test_a_prompt_longer_than_a_chunk_is_computed_in_chunks(tiny, start_engine, ask, reference):
    prompt = prompts(1, 400, 400)[0]
    assert ask(start_engine(tiny), prompt, greedy(8)).all() == reference(tiny, prompt, 8)


@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_do_not_depend_on_batch_mates(tiny, start_engine, ask, temperature):
    engine = start_engine(tiny)
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    alone = [ask(engine, p, q).all() for p, q in zip(prompts(8), params, strict=True)]
    together = [ask(engine, p, q) for p, q in zip(prompts(8), params, strict=True)]
    assert [heard.all() for heard in together] == alone


def test_several_requests_move_on_together(tiny, start_engine, ask):
    engine = start_engine(tiny)
    heard = [ask(engine, p, greedy(200)) for p in prompts(4)]
    for _ in range(3):
        for one in heard:
            one.next()
    assert all(one.reason is None for one in heard)
    for one in heard:
        engine.cancel(one.key)


def test_more_requests_than_places_wait_their_turn(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=2)
    heard = [ask(engine, p, greedy(5)) for p in prompts(9)]
    assert [len(one.all()) for one in heard] == [5] * 9


def test_a_cancelled_request_ends_and_the_others_go_on(tiny, start_engine, ask):
    engine = start_engine(tiny)
    first, second = (ask(engine, p, greedy(300)) for p in prompts(2))
    first.next()
    engine.cancel(first.key)
    first.all()
    assert first.reason is FinishReason.CANCELLED
    assert len(first.tokens) < 300
    assert len(second.all()) == 300


def test_cancelling_a_request_that_waits_ends_it(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=1)
    first, second = (ask(engine, p, greedy(100)) for p in prompts(2))
    engine.cancel(second.key)
    second.all()
    assert second.reason is FinishReason.CANCELLED
    assert not second.tokens
    assert len(first.all()) == 100


def test_cancelling_twice_or_after_the_end_does_nothing(tiny, start_engine, ask):
    engine = start_engine(tiny)
    heard = ask(engine, [5], greedy(2))
    heard.all()
    engine.cancel(heard.key)
    engine.cancel(12345)
    assert len(ask(engine, [5], greedy(2)).all()) == 2


def test_closing_ends_every_request(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=1)
    heard = [ask(engine, p, greedy(400)) for p in prompts(3)]
    assert engine.close(timeout_s=30)
    for one in heard:
        one.all()
        assert one.reason is FinishReason.CANCELLED


def test_the_end_token_ends_unless_it_is_ignored(tiny, start_engine, ask):
    engine = start_engine(tiny)
    bias = ((2, 100.0),)
    params = SamplingParams(max_tokens=6, temperature=0, logit_bias=bias)
    heard = ask(engine, [5, 6], params)
    assert heard.all() == [2]
    assert heard.reason is FinishReason.STOP
    late = SamplingParams(max_tokens=6, min_tokens=3, temperature=0, logit_bias=bias)
    heard = ask(engine, [5, 6], late)
    assert len(heard.all()) == 4
    assert 2 not in heard.tokens[:3]
    assert ask(engine, [5, 6], greedy(6, logit_bias=bias)).all() == [2] * 6


def test_a_stop_token_ends_even_where_end_tokens_are_ignored(tiny, start_engine, ask):
    params = greedy(6, logit_bias=((9, 100.0),), stop_token_ids=(9,))
    assert ask(start_engine(tiny), [5], params).all() == [9]


def test_a_seed_fixes_the_answer_and_no_seed_varies_it(tiny, start_engine, ask):
    engine = start_engine(tiny)
    seeded = SamplingParams(max_tokens=30, temperature=2, seed=3, ignore_eos=True)
    free = SamplingParams(max_tokens=30, temperature=2, ignore_eos=True)
    assert ask(engine, [5], seeded).all() == ask(engine, [5], seeded).all()
    assert ask(engine, [5], free).all() != ask(engine, [5], free).all()


@pytest.mark.parametrize(
    ("prompt", "params", "name"),
    [
        ([], greedy(1), "prompt"),
        ([400], greedy(1), "prompt"),
        ([-1], greedy(1), "prompt"),
        ([5], greedy(1, logit_bias=((400, 1.0),)), "logit_bias"),
        ([5], greedy(1, stop_token_ids=(400,)), "stop_token_ids"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_at_once(
    tiny, start_engine, ask, prompt, params, name
):
    with pytest.raises(RequestError) as caught:
        ask(start_engine(tiny), prompt, params)
    assert caught.value.where == name


def test_a_request_that_can_never_fit_is_refused_at_once(tiny, start_engine, ask):
    engine = start_engine(tiny, context=32)
    with pytest.raises(ContextLengthError):
        ask(engine, [5] * 30, greedy(3))
    assert len(ask(engine, [5] * 30, greedy(2)).all()) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiled_engine_gives_the_same_tokens(tiny, start_engine, ask):
    plain, compiled = start_engine(tiny), start_engine(tiny, is_compiled=True)
    for prompt in prompts(4, 1, 300):
        assert ask(compiled, prompt, greedy(12)).all() == ask(plain, prompt, greedy(12)).all()
