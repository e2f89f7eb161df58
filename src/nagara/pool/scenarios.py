"""Futures to plan for: what may be claimed and what may be granted, sampled evenly. Pure.

No chance is involved: the strata of each quantity are met in an order of its own (the radical
inverse in a prime base, J. H. Halton 1960), so that equal problems have equal plans.
"""

from collections.abc import Callable, Sequence

from nagara.pool.problem import Scenario

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


def radical_inverse(number: int, base: int) -> float:
    """The digits of `number` in `base`, mirrored at the point: in [0, 1)."""
    result, part = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        result += digit * part
        part /= base
    return result


def sample(
    demands: Sequence[Callable[[float], float]],
    supply: Sequence[tuple[int, float]],
    service: float,
    count: int,
) -> tuple[Scenario, ...]:
    """So many futures, equally likely.

    Args:
        demands: of each demand, the quantity at a quantile below `service`.
        supply: of each offer, how many are hoped for, and the chance that they come. A region
            that is out of stock is out of all of them: they come together or not at all.

    One future has every demand at `service`: less than that is not planned for.
    """
    futures = []
    for number in range(count):
        quantities = tuple(
            quantity(
                service
                if number == 0
                else service * radical_inverse(number, _PRIMES[at % len(_PRIMES)])
            )
            for at, quantity in enumerate(demands)
        )
        granted = tuple(
            hoped if _place(number, at, count) < chance else 0
            for at, (hoped, chance) in enumerate(supply)
        )
        futures.append(Scenario(quantities, granted))
    return tuple(futures)


def _place(number: int, offer: int, count: int) -> float:
    """Where an offer stands in a future: each its own order of the same even steps."""
    return (radical_inverse(number + 1, _PRIMES[offer % len(_PRIMES)]) + offer / count) % 1.0
