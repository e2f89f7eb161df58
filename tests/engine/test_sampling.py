"""Draws follow the filtered distribution and depend on seed and position alone."""

from collections import Counter

import pytest
import torch

from nagara.engine.request import Guide, SamplingParams
from nagara.engine.sampling import History, Sample, Sampler, logprobs_of, uniform

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])


def numbers(params, draws):
    row = [params.temperature, params.top_p, params.min_p]
    return torch.tensor([[*row, draw] for draw in draws], dtype=torch.float64).T


def drawn(params, count=4000, logits=LOGITS):
    """How often each token is drawn, in batches of eight."""
    counts = Counter()
    sampler = Sampler(8, len(logits), torch.device("cpu"))
    for first in range(0, count, 8):
        draws = [uniform(1, first + i) for i in range(8)]
        samples = [Sample(params, slot) for slot in range(8)]
        batch = logits.repeat(8, 1)
        counts.update(sampler.draw(batch, samples, numbers(params, draws), {}).tolist())
    return counts


def adjusted(params, prompt=(), output=(), **sample):
    """The logits after everything but the draw."""
    sampler = Sampler(1, 5, torch.device("cpu"))
    sampler.begin(History(0, tuple(prompt), tuple(output)))
    logits = LOGITS.clone()[None]
    sampler.draw(logits, [Sample(params, 0, **sample)], numbers(params, [0.5]), {})
    return logits[0]


def test_uniform_numbers_are_even_and_differ_by_seed_and_position():
    values = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert len(set(values)) == len(values)
    tenths = Counter(int(value * 10) for value in values)
    assert all(900 < tenths[i] < 1100 for i in range(10))


def test_frequencies_are_those_of_the_softmax():
    counts = drawn(SamplingParams(temperature=0.7))
    expected = torch.softmax(LOGITS / 0.7, 0)
    for token in range(5):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {1, 3}),
        (SamplingParams(top_p=0.5), {1}),
        (SamplingParams(top_p=0.8), {1, 3, 0}),
        (SamplingParams(min_p=0.3), {1, 3}),
        (SamplingParams(temperature=0), {1}),
        (SamplingParams(top_k=2, top_p=0.5), {1}),
    ],
)
def test_filters_leave_only_the_likely_tokens(params, allowed):
    assert set(drawn(params, 800)) == allowed


def test_a_filter_that_reaches_beyond_the_first_candidates_is_exact():
    logits = torch.linspace(1, 0, 3000)
    allowed = int((torch.softmax(logits, 0).cumsum(0) < 0.9).sum()) + 1
    counts = drawn(SamplingParams(top_p=0.9), 800, logits)
    assert max(counts) < allowed
    assert max(counts) > 1500


def test_a_mixed_batch_gives_each_row_what_it_gets_alone():
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3, temperature=2),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05, temperature=1.5),
    ]
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    table = torch.cat([numbers(p, [uniform(9, i)]) for i, p in enumerate(kinds)], 1)
    sampler = Sampler(5, 5, torch.device("cpu"))
    samples = [Sample(p, slot) for slot, p in enumerate(kinds)]
    together = sampler.draw(logits.clone(), samples, table, {})
    alone = [
        int(sampler.draw(logits[i : i + 1].clone(), [samples[i]], table[:, i : i + 1], {}))
        for i in range(5)
    ]
    assert together.tolist() == alone


def test_penalties_move_the_logits_of_seen_tokens():
    params = SamplingParams(
        repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((4, 3.0),)
    )
    moved = adjusted(params, prompt=[2], output=[1, 1])
    assert moved.tolist() == pytest.approx([0.5, 2.0 / 2 - 0.5 - 0.5, -2.0, 1.0, 3.0])


def test_a_drawn_token_counts_for_the_next_draw_without_the_host():
    params = SamplingParams(temperature=0, frequency_penalty=1.5)
    sampler = Sampler(1, 5, torch.device("cpu"))
    sampler.begin(History(0, (), ()))
    drawn = [
        int(sampler.draw(LOGITS.clone()[None], [Sample(params, 0)], numbers(params, [0.5]), {}))
        for _ in range(3)
    ]
    assert drawn == [1, 3, 1] or drawn == [1, 3, 0]
    assert drawn[1] == 3


def test_banned_and_forbidden_tokens_are_impossible():
    early = SamplingParams(temperature=0, min_tokens=1)
    assert adjusted(early, banned=(1,))[1] == float("-inf")
    params = SamplingParams(temperature=0, guide=Guide("regex", "a"))
    allowed = torch.tensor([True, False, True, False, False])
    assert adjusted(params, allowed=allowed).tolist()[1] == float("-inf")


def test_processors_see_their_own_copy_of_the_tokens():
    saw = []

    def first(seen, logits):
        saw.append(seen)
        return logits + 1

    def second(seen, logits):
        saw.append(seen)
        return logits * 2

    params = SamplingParams(temperature=0, logits_processors=(first, second))
    moved = adjusted(params, seen=(3, 4))
    assert moved.tolist() == pytest.approx(((LOGITS + 1) * 2).tolist())
    assert saw == [(3, 4), (3, 4)]


def test_logprobs_name_the_chosen_token_and_the_best():
    values, ids = logprobs_of(LOGITS[None], torch.tensor([0]), 2)
    expected = torch.log_softmax(LOGITS, 0)
    assert ids[0].tolist() == [0, 1, 3]
    assert values[0].tolist() == pytest.approx(expected[[0, 1, 3]].tolist())
