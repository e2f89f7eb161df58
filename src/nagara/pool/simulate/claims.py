"""Generated demand: claims of many apps, in bursts, with days and nights. Pure, from a seed.

Bursts arrive independently; a burst holds a geometric number of claims within seconds. Counts of
such arrivals have a variance of 2m − 1 times their mean for a mean burst of m claims: that sets
the dispersion. Apps differ in size by a power law and in the hour of their peak.
"""

import heapq
import math
import random
from dataclasses import dataclass

BURST_WITHIN_S = 20.0
_DAY_SWING = 0.8
WEEKEND = 0.4  # of a working day, on the sixth and seventh day
_SIZES = 0.8  # exponent of the apps' sizes


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """One replica wanted at a time, for a while once it is served."""

    at_s: float
    app: int
    hold_s: float


@dataclass(frozen=True, slots=True)
class DemandShape:
    """What kind of demand."""

    days: float = 7.0
    apps: int = 50
    dispersion: float = 20.0
    claims_h: float = 600.0  # of all apps together, on average
    hold_s: float = 600.0  # mean
    seed: int = 1


def generate(shape: DemandShape) -> list[Claim]:
    """All claims, in order of time."""
    source = random.Random(shape.seed)  # noqa: S311  # a simulation, no secret
    mean_burst = (shape.dispersion + 1) / 2
    weights = [1 / (rank + 1) ** _SIZES for rank in range(shape.apps)]
    claims: list[Claim] = []
    for app, weight in enumerate(weights):
        bursts_s = shape.claims_h * weight / sum(weights) / mean_burst / 3600
        peak = source.random() * 0.3 + 0.45  # most people are awake at the same time
        now_s = 0.0
        while True:
            now_s += source.expovariate(bursts_s * (1 + _DAY_SWING))
            if now_s >= shape.days * 86_400:
                break
            if source.random() * (1 + _DAY_SWING) > _level(now_s / 86_400, peak):
                continue
            for _ in range(_geometric(source, mean_burst)):
                at_s = now_s + source.random() * BURST_WITHIN_S
                claims.append(Claim(at_s, app, _hold(source, shape.hold_s)))
    heapq.heapify(claims)
    return [heapq.heappop(claims) for _ in range(len(claims))]


def _level(days: float, peak: float) -> float:
    """How much is going on, 1 on the average of a working day."""
    week = WEEKEND if days % 7 >= 5 else 1.0
    return week * (1 + _DAY_SWING * math.cos(2 * math.pi * (days - peak)))


def _geometric(source: random.Random, mean: float) -> int:
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - source.random()) / math.log(1 - 1 / mean))


def _hold(source: random.Random, mean_s: float) -> float:
    return mean_s * source.lognormvariate(-0.5, 1.0)  # of mean 1


def dispersion(claims: list[Claim], window_s: float = 60.0, mean_over: int = 60) -> float:
    """Variance over mean of claims per window, around the mean of each `mean_over` windows.

    Days and nights are no bursts: they are left out by comparing with the hour's own mean.
    """
    if not claims:
        return 0.0
    counts = [0] * (int(claims[-1].at_s // window_s) + 1)
    for claim in claims:
        counts[int(claim.at_s // window_s)] += 1
    squares = total = 0.0
    for begin in range(0, len(counts) - mean_over + 1, mean_over):
        hour = counts[begin : begin + mean_over]
        mean = sum(hour) / mean_over
        squares += sum((count - mean) ** 2 for count in hour) / (mean_over - 1)
        total += mean
    return squares / total if total else 0.0
