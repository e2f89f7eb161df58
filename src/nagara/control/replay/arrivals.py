"""Where the requests of a replay come from: a recorded trace, or a generated one by its name. Pure.

Generated ones are the same in every run. A request of theirs takes 1 s and 0.03 s for each of 30
generated tokens on average, as in a recorded trace.
"""

import math
import random
from collections.abc import Callable, Iterator

from nagara.base.errors import UsageError

Request = tuple[float, float]  # (arrival, duration) in seconds
HOUR_S = 3600.0
_FIXED_S, _TOKEN_S, _TOKENS = 1.0, 0.03, 30.0
_SEED = 1


def generated(name: str) -> list[Request]:
    """The requests of `gen:NAME`.

    Raises:
        UsageError: there is no such generator.
    """
    make = GENERATORS.get(name)
    if make is None:
        raise UsageError(
            f"there is no generated trace {name!r}", hint=f"one of: {', '.join(GENERATORS)}"
        )
    source = random.Random(_SEED)  # noqa: S311  # made-up load, no secret
    return [(at_s, _takes_s(source)) for at_s in make(source)]


def _takes_s(source: random.Random) -> float:
    return _FIXED_S + _TOKEN_S * source.expovariate(1.0 / _TOKENS)


def _poisson(source: random.Random, rate: Callable[[float], float], most: float) -> Iterator[float]:
    """Arrivals of one hour with a rate that changes; `most` bounds it."""
    at_s = 0.0
    while True:
        at_s += source.expovariate(most)
        if at_s >= HOUR_S:
            return
        if source.random() * most < rate(at_s):
            yield at_s


def _steady(source: random.Random) -> Iterator[float]:
    """Five requests a second."""
    return _poisson(source, lambda _: 5.0, 5.0)


def _steps(source: random.Random) -> Iterator[float]:
    """One request a second, and twenty during every fourth period of five minutes."""
    return _poisson(source, lambda at_s: 20.0 if int(at_s // 300) % 4 == 2 else 1.0, 20.0)


def _waves(source: random.Random) -> Iterator[float]:
    """Between none and ten a second, in waves of twenty minutes."""
    return _poisson(source, lambda at_s: 5.0 - 5.0 * math.cos(at_s * math.tau / 1200), 10.0)


def _bursts(source: random.Random) -> Iterator[float]:
    """Nothing but bursts: some 40 requests within 2 s, about every 2 minutes."""
    at_s = source.expovariate(1 / 120)
    while at_s < HOUR_S:
        count = 1 + int(source.expovariate(1 / 40))
        yield from sorted(at_s + source.random() * 2.0 for _ in range(count))
        at_s += 2.0 + source.expovariate(1 / 120)


def _regular(source: random.Random) -> Iterator[float]:
    """Five requests every four minutes, to the second: a job of somebody's clock."""
    at_s = 10.0
    while at_s < HOUR_S:
        yield from (at_s + 0.1 * number for number in range(5))
        at_s += 240.0


def _sparse(source: random.Random) -> Iterator[float]:
    """One request every three minutes or so."""
    return _poisson(source, lambda _: 1 / 180, 1 / 180)


GENERATORS: dict[str, Callable[[random.Random], Iterator[float]]] = {
    "steady": _steady,
    "steps": _steps,
    "waves": _waves,
    "bursts": _bursts,
    "regular": _regular,
    "sparse": _sparse,
}
