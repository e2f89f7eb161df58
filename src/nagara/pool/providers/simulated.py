"""A provider that exists only in memory: prices, stock, boot times, machines that are no good.

For tests and capacity planning. Everything random comes from one seed, so that two runs see the
same world. `SimulatedMarket` is told the time and never waits; `SimulatedProvider` puts the
asynchronous protocol before it, with a clock.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from nagara.base.clock import Clock
from nagara.contract.machine import (
    NoCapacityError,
    Offering,
    Presence,
    ProviderMachine,
)

Stock = Callable[[float], int]  # machines to be had at a time


@dataclass(frozen=True, slots=True)
class Trait:
    """How one offering behaves, whatever it says."""

    boot_s: float = 150.0  # median; single boots spread log-normally
    boot_spread: float = 0.25  # sigma of the logarithm
    dead_share: float = 0.0  # granted machines that never come up
    bad_share: float = 0.0  # machines that come up and fail their checks
    reclaims_h: float = 0.0  # chance per machine and hour to be taken away
    price_swing: float = 0.0  # share by which the price swings over a day
    stock: Stock | None = None  # None: no limit
    is_lying: bool = False  # advertises plenty, whatever the stock


@dataclass(slots=True)
class SimulatedMachine:
    """One machine of the world."""

    name: str
    offering: Offering
    asked_s: float
    up_s: float  # infinite: never
    ends_s: float  # when it is taken away; infinite: never
    is_bad: bool


@dataclass(slots=True)
class SimulatedMarket:
    """The machines of one provider, and who pays how much for them."""

    name: str
    kinds: dict[str, Offering]
    traits: dict[str, Trait]
    seed: int = 0
    cost: float = 0.0
    paid_hours: float = 0.0
    refusals: int = 0
    machines: dict[str, SimulatedMachine] = field(default_factory=dict)
    now_s: float = 0.0
    _random: random.Random = field(default_factory=random.Random)
    _count: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311  # a simulation, no secret

    def advance(self, now_s: float) -> list[str]:
        """Lets time pass; returns the machines that were taken away meanwhile."""
        hours = (now_s - self.now_s) / 3600
        self.now_s = now_s
        taken = []
        prices = {kind.id: self._price(kind) for kind in self.kinds.values()}
        for machine in list(self.machines.values()):
            self.cost += hours * prices[machine.offering.id]
            self.paid_hours += hours
            if machine.ends_s <= now_s:
                self._remove(machine.name)
                taken.append(machine.name)
        return taken

    def offerings(self) -> tuple[Offering, ...]:
        """What is advertised now."""
        shown = []
        for kind in self.kinds.values():
            trait = self.traits[kind.id]
            stock: int | None = None
            if trait.is_lying:
                stock = 1000
            elif trait.stock is not None:
                stock = max(0, trait.stock(self.now_s) - self._count.get(kind.id, 0))
            shown.append(replace(kind, price_h=self._price(kind), stock=stock))
        return tuple(shown)

    def launch(self, name: str, offering: str) -> None:
        """Raises `NoCapacityError` when nothing is left."""
        kind, trait = self.kinds[offering], self.traits[offering]
        if name in self.machines:
            return  # asked twice under one name: one machine
        count = self._count.get(offering, 0)
        if trait.stock is not None and count >= trait.stock(self.now_s):
            self.refusals += 1
            raise NoCapacityError("no such machine at present", where=offering)
        boot_s = trait.boot_s * math.exp(self._random.gauss(0, trait.boot_spread))
        is_dead = self._random.random() < trait.dead_share
        is_bad = self._random.random() < trait.bad_share
        lives_s = math.inf
        if trait.reclaims_h > 0:
            lives_s = self._random.expovariate(trait.reclaims_h) * 3600
        self.machines[name] = SimulatedMachine(
            name=name, offering=kind, asked_s=self.now_s,
            up_s=math.inf if is_dead else self.now_s + boot_s,
            ends_s=self.now_s + lives_s, is_bad=is_bad,
        )  # fmt: skip
        self._count[offering] = count + 1

    def release(self, name: str) -> None:
        """An unknown name is no error."""
        if name in self.machines:
            self._remove(name)

    def listing(self) -> list[ProviderMachine]:
        """Everything that costs money now."""
        return [
            ProviderMachine(
                machine.name,
                machine.offering.id,
                Presence.RUNNING if machine.up_s <= self.now_s else Presence.PENDING,
                f"sim:{machine.name}",
            )
            for machine in self.machines.values()
        ]

    def _remove(self, name: str) -> None:
        machine = self.machines.pop(name)
        self._count[machine.offering.id] -= 1

    def _price(self, kind: Offering) -> float:
        swing = self.traits[kind.id].price_swing
        phase = 2 * math.pi * self.now_s / 86_400 + len(kind.id)
        return kind.price_h * (1 + swing * math.sin(phase))


class SimulatedProvider:
    """The market behind the provider protocol, at the pace of a clock."""

    def __init__(self, market: SimulatedMarket, clock: Clock) -> None:
        self.market = market
        self._clock = clock
        self._begun_s = clock.monotonic_s()

    @property
    def name(self) -> str:
        """As in `Offering.provider`."""
        return self.market.name

    async def offerings(self) -> tuple[Offering, ...]:
        """What is advertised now."""
        self._catch_up()
        return self.market.offerings()

    async def launch(self, name: str, offering: Offering) -> None:
        """Accepts or raises at once."""
        self._catch_up()
        self.market.launch(name, offering.id)

    async def release(self, name: str) -> None:
        """Ends it at once."""
        self._catch_up()
        self.market.release(name)

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """Everything that costs money now."""
        self._catch_up()
        return tuple(self.market.listing())

    def _catch_up(self) -> None:
        self.market.advance(self._clock.monotonic_s() - self._begun_s)


def a_market(
    kinds: Iterable[tuple[Offering, Trait]], *, name: str, seed: int = 0
) -> SimulatedMarket:
    """A market of these offerings."""
    pairs = list(kinds)
    return SimulatedMarket(
        name, {kind.id: kind for kind, _ in pairs}, {kind.id: trait for kind, trait in pairs}, seed
    )
