"""Tokens are those of transformers, whatever runs beside them; every request ends."""

import asyncio
import io
import logging
import sys
import time
from dataclasses import replace

import pytest
from engine_cases import greedy, prompts

from nagara.engine.errors import (
    ContextLengthError,
    EngineError,
    RequestError,
    UnsupportedError,
)
from nagara.engine.request import FinishReason, SamplingParams
from nagara.engine.settings import EngineSettings

FAMILIES = [
    "llama",
    "llama3-rope",
    "yarn-rope",
    "linear-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
]


@pytest.mark.parametrize("kernel", ["c", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(
    family, make_model, start_engine, ask, reference
):
    folder = make_model(family)
    engine = start_engine(folder)
    for prompt in prompts(3):
        assert ask(engine, prompt, greedy(40)).all() == reference(folder, prompt, 40)


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "gemma2", "gemma3", "llama", "mistral"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_computed_by_transformers_code_give_its_tokens(
    family, make_model, start_engine, ask, reference
):
    folder = make_model(family)
    engine = start_engine(folder, kernel="transformers")
    heard = [ask(engine, prompt, greedy(30)) for prompt in prompts(3)]
    for one, prompt in zip(heard, prompts(3), strict=True):
        assert one.all() == reference(folder, prompt, 30)


@pytest.mark.parametrize("family", ["qwen2-windows", "partial-rope"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_own_forward_lacks_goes_to_transformers_code(
    family, make_model, start_engine, ask, reference
):
    folder = make_model(family)
    engine = start_engine(folder)
    assert engine.stats().kernel == "transformers"
    for prompt in prompts(3):
        assert ask(engine, prompt, greedy(30)).all() == reference(folder, prompt, 30)
    with pytest.raises(UnsupportedError):
        start_engine(folder, kernel="c")


def test_a_kernel_that_cannot_compute_an_architecture_is_refused(make_model, start_engine):
    with pytest.raises(UnsupportedError, match="gpt2"):
        start_engine(make_model("gpt2"), kernel="c")


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
@pytest.mark.filterwarnings("ignore:.*[Dd]istutils:UserWarning")  # torch's compiler imports both
def test_the_compiled_engine_gives_the_same_tokens(tiny, start_engine, ask):
    plain, compiled = start_engine(tiny), start_engine(tiny, is_compiled=True)
    for prompt in prompts(4, 1, 300):
        assert ask(compiled, prompt, greedy(12)).all() == ask(plain, prompt, greedy(12)).all()


@pytest.mark.parametrize("kernel", ["c", "torch"])
def test_a_tiny_cache_preempts_and_changes_no_token(tiny, start_engine, ask, reference):
    engine = start_engine(tiny, cache_tokens=160, max_concurrency=6)
    heard = [ask(engine, p, greedy(60)) for p in prompts(6, 10, 40)]
    for one, prompt in zip(heard, prompts(6, 10, 40), strict=True):
        assert one.all() == reference(tiny, prompt, 60)
    assert engine.stats().preemptions > 0


def test_a_repeated_prompt_is_found_in_the_cache(tiny, start_engine, ask):
    engine = start_engine(tiny)
    prompt = prompts(1, 100, 100)[0]
    first = ask(engine, prompt, greedy(10)).all()
    assert engine.stats().prefix_hit_share == 0
    assert ask(engine, prompt, greedy(10)).all() == first
    assert engine.stats().prefix_hit_share == pytest.approx(96 / 200)


def test_the_c_kernel_gives_bit_equal_logprobs_in_every_batch(tiny, start_engine, ask):
    engine = start_engine(tiny, kernel="c", chunk_rows=16)
    many = prompts(8, 5, 60)

    def logprobs(heard):
        out = []
        while heard.reason is None:
            event = heard.next()
            out.append((event.token_id, event.logprob.logprob, event.logprob.top))
        return out

    params = greedy(12, logprobs=2)
    alone = [logprobs(ask(engine, p, params)) for p in many]
    together = [ask(engine, p, params) for p in many]
    assert [logprobs(heard) for heard in together] == alone


@pytest.mark.parametrize("kernel", ["torch", "transformers"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batch_invariance_is_refused_where_the_last_bits_depend_on_the_batch(
    tiny, start_engine, kernel
):
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        start_engine(tiny, kernel=kernel, is_batch_invariant=True)


def test_the_c_kernel_is_batch_invariant(tiny, start_engine):
    assert start_engine(tiny, kernel="c", is_batch_invariant=True).stats().kernel == "c"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("screen", "is_drawn"), [(Terminal, True), (io.StringIO, False)])
def test_generate_draws_a_bar_on_a_terminal_only(tiny, start_engine, monkeypatch, screen, is_drawn):
    shown = screen()
    monkeypatch.setattr(sys, "stderr", shown)
    start_engine(tiny).generate([[5], [6, 7]], greedy(3), progress=True)
    assert ("2/2" in shown.getvalue()) == is_drawn
    assert bool(shown.getvalue()) == is_drawn


def test_stats_say_how_much_waits_and_how_much_of_the_cache_is_held(tiny, start_engine, ask):
    engine = start_engine(tiny, max_concurrency=1, cache_tokens=512)
    assert (engine.stats().queue, engine.stats().kv_use) == (0, 0.0)
    heard = [ask(engine, [5] * 20, greedy(300)) for _ in range(3)]
    while engine.stats().queue < 2:
        time.sleep(0.001)
    heard[0].next()
    assert 0 < engine.stats().kv_use <= 1
    for one in heard:
        engine.cancel(one.key)


def test_generate_returns_answers_in_order_and_reports_progress(tiny, start_engine):
    engine = start_engine(tiny)
    seen = []
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = engine.generate(
        ["the quick", [5, 6], "lazy dog"], params, progress=lambda done, all_: seen.append(done)
    )
    assert [len(output.token_ids) for output in outputs] == [8, 8, 8]
    assert seen == [1, 2, 3]
    again = engine.generate(["lazy dog"], params)
    assert again[0].text == outputs[2].text


def test_generate_computes_nothing_if_one_prompt_is_refused(tiny, start_engine):
    engine = start_engine(tiny)
    with pytest.raises(RequestError):
        engine.generate(["the", []], SamplingParams())
    assert engine.stats().steps == 0


async def test_stream_gives_pieces_and_leaving_it_cancels(tiny, start_engine):
    engine = start_engine(tiny, max_concurrency=1)
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    stream = engine.stream("the quick brown", params)
    async for piece in stream:
        assert piece.text or piece.token_ids
        break
    await stream.aclose()
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    last = [piece async for piece in engine.stream("the", short)][-1]
    assert last.finish_reason is FinishReason.LENGTH


async def test_one_slow_reader_among_eight_starves_nobody(tiny, start_engine):
    engine = start_engine(tiny, max_concurrency=8)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    slow = engine.stream("the", params)
    await anext(slow)

    async def read(i):
        return [piece async for piece in engine.stream([5 + i], params)]

    others = await asyncio.gather(*(read(i) for i in range(7)))
    assert all(pieces[-1].completion_tokens == 60 for pieces in others)
    rest = [piece async for piece in slow]
    assert rest[-1].completion_tokens == 60


def test_a_stop_string_ends_the_computing_too(tiny, start_engine):
    engine = start_engine(tiny)
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    whole = engine.generate(["the quick"], params)[0].text
    stop = whole[20:24]
    before = engine.stats().rows
    cut = engine.generate(["the quick"], replace(params, stop=(stop,)))[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    held_back = 2 * len(stop)  # tokens whose text may still be part of the stop string
    assert engine.stats().rows - before <= 9 + cut.completion_tokens + held_back


def test_sleep_drops_the_cache_and_wake_takes_requests_again(tiny, start_engine, ask):
    engine = start_engine(tiny)
    first = ask(engine, [5, 6], greedy(5)).all()
    running = ask(engine, [7], greedy(400))
    running.next()
    engine.sleep()
    running.all()
    assert running.reason is FinishReason.CANCELLED
    with pytest.raises(EngineError, match="asleep"):
        ask(engine, [5], greedy(1))
    engine.sleep()
    engine.wake()
    assert ask(engine, [5, 6], greedy(5)).all() == first


def test_a_failing_step_ends_every_request_with_the_error(tiny, start_engine, ask, monkeypatch):
    engine = start_engine(tiny)
    logging.getLogger("nagara.engine").setLevel(logging.CRITICAL)

    def fail(_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._model, "forward", fail)
    heard = ask(engine, [5], greedy(5))
    with pytest.raises(EngineError, match="device is gone"):
        heard.all()
    with pytest.raises(EngineError, match="device is gone"):
        ask(engine, [5], greedy(5))


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 2},
        {"kernel": "magic"},
        {"device": "tpu"},
        {"chunk_rows": 0},
        {"is_compiled": True, "kernel": "c"},
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings):
    with pytest.raises(UnsupportedError):
        EngineSettings(**settings)
