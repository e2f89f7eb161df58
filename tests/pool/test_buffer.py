import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nagara.pool.buffer import ArrivalMeter, reserve
from nagara.pool.simulate.claims import DemandShape, dispersion, generate


def fed(counts: list[int]) -> ArrivalMeter:
    meter = ArrivalMeter(0.0)
    for minute, count in enumerate(counts):
        meter.add(count, minute * 60.0 + 1.0)
    meter.advance(len(counts) * 60.0)
    return meter


def test_steady_arrivals_have_their_rate_and_the_least_dispersion() -> None:
    meter = fed([10] * 3000)
    assert meter.rate() == pytest.approx(10.0)
    assert meter.dispersion == 1.0


def test_bursts_are_measured_as_what_they_are() -> None:
    source = random.Random(3)
    counts = [20 if source.random() < 0.05 else 0 for _ in range(6000)]
    assert fed(counts).dispersion == pytest.approx(19.0, rel=0.25)


def test_the_generated_demand_has_the_dispersion_it_was_asked_for() -> None:
    claims = generate(DemandShape(days=3, apps=20, dispersion=20.0))
    assert dispersion(claims) == pytest.approx(20.0, rel=0.2)
    assert claims == sorted(claims)
    assert claims == generate(DemandShape(days=3, apps=20, dispersion=20.0))


def test_a_long_silence_is_cheap_and_ends_the_rate() -> None:
    meter = fed([10] * 100)
    meter.advance(1e7)
    assert meter.rate() < 1e-6


def test_the_reserve_follows_the_normal_formula_where_it_is_the_larger() -> None:
    assert reserve(100.0, 1.0, 0.5) == pytest.approx(100.0, abs=0.5)
    z = 2.3263
    assert reserve(400.0, 4.0, 0.99) >= 400 + z * math.sqrt(1600) - 0.1


def test_pooling_needs_far_less_than_reserves_apart() -> None:
    apart = 50 * math.ceil(reserve(0.8, 1.0, 0.99))
    together = reserve(40.0, 1.0, 0.99)
    assert apart / together > 3


@given(st.floats(0.01, 1000), st.floats(1, 200), st.floats(0.5, 0.999))
def test_more_service_never_means_less_reserve(
    arrivals: float, spread: float, service: float
) -> None:
    more = reserve(arrivals, spread, min(0.9999, service + 0.0005))
    assert more >= reserve(arrivals, spread, service) - 1e-9 >= -1e-9
