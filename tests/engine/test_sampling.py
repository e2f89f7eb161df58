"""Draws follow the filtered distribution and depend on seed and position alone."""

from collections import Counter

import pytest
import torch

from nagara.engine.request import SamplingParams
from nagara.engine.sampling import adjust, draw, logprob_of, uniform

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])


def drawn(params, count=4000):
    return Counter(draw(LOGITS, params, seed=1, position=i) for i in range(count))


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


def test_penalties_move_the_logits_of_seen_tokens():
    params = SamplingParams(
        repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((4, 3.0),)
    )
    moved = adjust(LOGITS, params, prompt=[2], output=[1, 1], end_ids=())
    assert moved.tolist() == pytest.approx([0.5, 2.0 / 2 - 0.5 - 0.5, -2.0, 1.0, 3.0])


def test_end_tokens_are_impossible_before_the_least_length():
    params = SamplingParams(min_tokens=2)
    assert adjust(LOGITS, params, [], [7], (1,))[1] == float("-inf")
    assert adjust(LOGITS, params, [], [7, 7], (1,))[1] == 2.0


def test_logprobs_name_the_chosen_token_and_the_best():
    item = logprob_of(LOGITS, 0, 2)
    expected = torch.log_softmax(LOGITS, 0)
    assert item.logprob == pytest.approx(float(expected[0]))
    assert [token for token, _ in item.top] == [1, 3]
