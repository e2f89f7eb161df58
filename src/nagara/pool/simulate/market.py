"""The simulated world that all policies live in: providers, regions, prices, faults.

One device type and one device a machine, so that slots are machines and rivals need no packing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from nagara.contract.machine import NoCapacityError, Offering, ProviderMachine
from nagara.pool.providers.simulated import SimulatedMarket, Stock, Trait, a_market

_PLACES = (
    ("north", "n-1", 1.00), ("north", "n-2", 1.04), ("north", "n-3", 1.10),
    ("west", "w-1", 1.06), ("west", "w-2", 1.12), ("west", "w-3", 1.20),
    ("south", "s-1", 1.15), ("south", "s-2", 1.25),
)  # fmt: skip
PRICE_H = 2.0
LIAR = "liar"


@dataclass(frozen=True, slots=True)
class WorldShape:
    """What goes wrong in it."""

    has_stockouts: bool = False  # the cheapest region is sold out for hours at a time
    has_liar: bool = False  # a still cheaper provider says it has plenty and has next to nothing
    seed: int = 1


class World:
    """All providers of one run."""

    def __init__(self, shape: WorldShape) -> None:
        self.markets: dict[str, SimulatedMarket] = {}
        by_provider: dict[str, list[tuple[Offering, Trait]]] = {}
        for provider, region, factor in _PLACES:
            stock: Stock | None = None
            if shape.has_stockouts and region == "n-1":
                stock = outages(shape.seed)
            by_provider.setdefault(provider, []).append(
                (
                    Offering(f"{provider}-{region}", provider, region, "h100", 1, PRICE_H * factor),
                    Trait(price_swing=0.05, dead_share=0.01, bad_share=0.01, stock=stock),
                )
            )
        if shape.has_liar:
            by_provider[LIAR] = [
                (
                    Offering(f"{LIAR}-x-1", LIAR, "x-1", "h100", 1, PRICE_H * 0.8),
                    Trait(stock=lambda _: 3, is_lying=True, dead_share=0.7),
                ),
                (
                    Offering(f"{LIAR}-x-2", LIAR, "x-2", "h100", 1, PRICE_H * 0.85),
                    Trait(is_lying=True, dead_share=1.0),
                ),
            ]
        for number, (provider, kinds) in enumerate(by_provider.items()):
            market = a_market(kinds, name=provider, seed=shape.seed * 100 + number)
            self.markets[provider] = market
        self._reclaimed: list[str] = []

    @property
    def cost(self) -> float:
        """Money spent so far."""
        return sum(market.cost for market in self.markets.values())

    @property
    def paid_hours(self) -> float:
        """Machine hours paid for so far."""
        return sum(market.paid_hours for market in self.markets.values())

    def advance(self, now_s: float) -> None:
        """Lets time pass everywhere."""
        for market in self.markets.values():
            market.advance(now_s)

    def offerings(self) -> tuple[Offering, ...]:
        """Everything advertised."""
        return tuple(one for market in self.markets.values() for one in market.offerings())

    def launch(self, name: str, offering: Offering) -> bool:
        """False when the provider has no such machine."""
        try:
            self.markets[offering.provider].launch(name, offering.id)
        except NoCapacityError:
            return False
        return True

    def release(self, name: str, provider: str) -> None:
        """Ends a machine."""
        self.markets[provider].release(name)

    def listing(self, provider: str) -> list[ProviderMachine]:
        """One provider's machines."""
        return self.markets[provider].listing()

    def is_bad(self, name: str, provider: str) -> bool:
        """Whether the machine fails its boot checks."""
        machine = self.markets[provider].machines.get(name)
        return machine is None or machine.is_bad


def outages(seed: int) -> Callable[[float], int]:
    """Stock that is nothing about half of the time, in stretches of hours."""
    source = random.Random(seed)  # noqa: S311  # a simulation, no secret
    edges: list[float] = []
    at_s = 0.0
    while at_s < 60 * 86_400:
        at_s += source.uniform(2, 10) * 3600
        edges.append(at_s)

    def stock(now_s: float) -> int:
        low, high = 0, len(edges)
        while low < high:
            middle = (low + high) // 2
            if edges[middle] <= now_s:
                low = middle + 1
            else:
                high = middle
        return 10**6 if low % 2 == 0 else 0

    return stock
