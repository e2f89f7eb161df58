"""Machines of a cluster that Ray, or another engine, holds together: they are there already.

An offering is a kind of machine: as many devices of a type, and cores. Launching one lends
a machine of that kind that nobody uses; where there is none, and the pool's file says that the
engine's autoscaler may add such, it is asked to, and the machine is pending until it has come. One
of which nothing is on its way for a while is refused: the last one asked for, as it may be just
what is too much. Knows nothing of Ray itself: an adapter does.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nagara.base.clock import Clock, SystemClock
from nagara.contract.cluster import ClusterEngine, EngineMachine, MachineKind
from nagara.contract.machine import (
    NoCapacityError,
    Offering,
    Presence,
    ProviderMachine,
    Resources,
)

ADDED_PRICE_H = 1.0
PATIENCE_S = 20.0  # an autoscaler decides every five seconds, and tells what it does when it has


@dataclass(frozen=True, slots=True)
class AddedKind:
    """A kind that the autoscaler may add, at most so many at once."""

    kind: MachineKind
    most: int = 1


@dataclass(frozen=True, slots=True)
class RayTerms:
    """What the pool's file says of a cluster.

    Attributes:
        slots: replicas at once on a machine without devices; None: one a core.
        price_h: of a machine, by its devices' type. Others cost nothing, but for a kind that is
            added: what costs nothing would never be given back.
        adds: what the autoscaler may add.
    """

    slots: int | None = None
    price_h: Mapping[str, float] | None = None
    adds: tuple[AddedKind, ...] = ()


class RayProvider:
    """Lends an engine's machines.

    Args:
        engine: what reaches it.
    """

    def __init__(
        self,
        name: str,
        engine: ClusterEngine,
        terms: RayTerms | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._terms = terms or RayTerms()
        self._clock = clock or SystemClock()
        self._pending: dict[str, Offering] = {}  # names whose machines are still to come
        self._refused: dict[str, ProviderMachine] = {}  # and those that will not
        self._is_asked = bool(self._terms.adds)  # an earlier process may have asked for something
        self._stuck_since_s: float | None = None

    @property
    def name(self) -> str:
        """As in `Offering.provider`."""
        return self._name

    async def offerings(self) -> tuple[Offering, ...]:
        """Each kind that is there or may be added; its stock is what nobody uses."""
        machines = await self._engine.machines()
        largest_first = sorted(machines, key=lambda one: one.memory_bytes, reverse=True)
        found = {one.id: one for one in map(self._offering, largest_first)}  # the least stays
        stock = Counter(self._offering(one).id for one in machines if _is_free(one))
        for added in self._terms.adds:
            one = self._of_kind(added.kind, self._name)
            found.setdefault(one.id, one)
            stock[one.id] += added.most
        return tuple(replace(one, stock=stock[one.id]) for one in found.values())

    async def launch(self, name: str, offering: Offering) -> None:
        """Lends a free machine of the kind, or has one added."""
        machines = await self._engine.machines()
        if name in self._pending or any(one.lent_as == name for one in machines):
            return
        if await self._lend(name, offering, machines):
            return
        wanted = [one for one in self._terms.adds if self._is_added(one, offering)]
        waiting = sum(one.id == offering.id for one in self._pending.values())
        if not wanted or waiting >= wanted[0].most:
            raise NoCapacityError("no machine of this kind is free", where=offering.id)
        self._pending[name] = offering
        self._stuck_since_s = None
        try:
            await self._ask()
        except BaseException:
            del self._pending[name]
            raise

    async def release(self, name: str) -> None:
        """Gives the machine back to the engine, or no longer waits for it."""
        self._refused.pop(name, None)
        if self._pending.pop(name, None) is not None:
            await self._ask()
        for machine in await self._engine.machines():
            if machine.lent_as == name:
                await self._engine.take_back(machine.id)

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """Those lent, and those waited for; what has come meanwhile is lent to who waits."""
        machines = await self._engine.machines()
        if self._pending:
            machines = await self._hand_out(machines)
        if self._pending or self._is_asked:
            await self._ask()  # another job may have asked for something else meanwhile
        return (
            *(self._listed(one) for one in machines if one.lent_as),
            *(
                ProviderMachine(name, offering.id, Presence.PENDING)
                for name, offering in self._pending.items()
            ),
            *self._refused.values(),
        )

    def _listed(self, machine: EngineMachine) -> ProviderMachine:
        presence = Presence.RUNNING if machine.address else Presence.PENDING
        offering = self._offering(machine).id
        return ProviderMachine(machine.lent_as, offering, presence, machine.address)

    async def _hand_out(self, machines: tuple[EngineMachine, ...]) -> tuple[EngineMachine, ...]:
        for name, offering in list(self._pending.items()):
            if await self._lend(name, offering, machines):
                del self._pending[name]
                self._stuck_since_s = None
                machines = await self._engine.machines()
        return machines

    async def _lend(self, name: str, offering: Offering, machines: Iterable[EngineMachine]) -> bool:
        refusal: NoCapacityError | None = None
        for machine in machines:
            if _is_free(machine) and self._is_of(machine, offering):
                try:
                    await self._engine.lend(machine.id, name)
                except NoCapacityError as error:  # somebody else was quicker
                    refusal = error
                else:
                    return True
        if refusal is not None and not self._terms.adds:
            raise refusal
        return False

    async def _ask(self) -> None:
        kinds = []
        for offering in self._pending.values():
            kinds += [a.kind for a in self._terms.adds if self._is_added(a, offering)][:1]
        self._is_asked = True
        obstacle = await self._engine.ask_for(tuple(kinds))
        self._is_asked = bool(kinds)
        now_s = self._clock.monotonic_s()
        if not obstacle or not kinds:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s >= PATIENCE_S:
            self._stuck_since_s = None
            name, offering = self._pending.popitem()
            self._refused[name] = ProviderMachine(
                name, offering.id, Presence.REFUSED, problem=obstacle
            )
            await self._ask()

    def _is_of(self, machine: EngineMachine, offering: Offering) -> bool:
        """Whether the machine is what was offered; of an added one nobody knew the region."""
        kind = MachineKind(machine.type, machine.devices, machine.cpu)
        is_added = any(self._is_added(one, offering) for one in self._terms.adds)
        somewhere = self._of_kind(kind, self._name).id if is_added else ""
        return offering.id in (somewhere, self._offering(machine).id)

    def _is_added(self, added: AddedKind, offering: Offering) -> bool:
        return self._of_kind(added.kind, self._name).id == offering.id

    def _offering(self, machine: EngineMachine) -> Offering:
        kind = MachineKind(machine.type, machine.devices, machine.cpu, machine.memory_bytes)
        offering = self._of_kind(kind, machine.region or self._name)
        if not machine.memory_bytes or not machine.disk_bytes:
            return offering
        whole = Resources(machine.cpu, machine.memory_bytes, machine.disk_bytes)
        return replace(offering, resources=whole)

    def _of_kind(self, kind: MachineKind, region: str) -> Offering:
        size = f"{kind.type}x{kind.devices}" if kind.devices else kind.type
        where = "" if region == self._name else f"-{region}"
        prices = self._terms.price_h or {}
        alike = (kind.type, kind.devices, round(kind.cpu))
        is_added = any(
            alike == (one.kind.type, one.kind.devices, round(one.kind.cpu))
            for one in self._terms.adds
        )
        return Offering(
            id=f"{self._name}/{size}-{kind.cpu:.0f}c{where}",
            provider=self._name,
            region=region,
            type=kind.type,
            devices=kind.devices or self._terms.slots or max(1, int(kind.cpu)),
            price_h=prices.get(kind.type, ADDED_PRICE_H if is_added else 0.0),
        )


def _is_free(machine: EngineMachine) -> bool:
    return not machine.lent_as and not machine.problem
