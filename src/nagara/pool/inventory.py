"""Which slot a claim gets: free slots, indexed so that the answer takes microseconds.

Machines of one offering form a group. Inside it, partly used machines are filled first, so that
whole machines become idle and can be given back. For every class of claims a heap holds the
groups that have something free, cheapest first; an entry that has become wrong is dropped when
it comes up. Called from the pool's loop only; knows nothing of states, clocks and records.
"""

import fnmatch
import heapq
from dataclasses import dataclass, field
from typing import Protocol

from nagara.contract.machine import NO_RESOURCES, Offering, Resources
from nagara.pool.machines import Machine

CPU_TARGET, MEMORY_TARGET, DISK_TARGET = 0.85, 0.90, 0.85  # of what a machine has; never all
_TRIED_MACHINES = 32  # of one group, when resources decide


class Kind(Protocol):
    """What a class of claims looks at."""

    @property
    def type(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def devices(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DemandClass:
    """What a claim accepts. Claims of one class can take each other's slots."""

    types: frozenset[str] | None = None  # None: any
    regions: tuple[str, ...] = ()  # patterns such as `eu-*`; empty: any
    devices: int = 1  # of one machine

    def accepts(self, offering: Kind) -> bool:
        """Whether a machine of this kind will do: a hard limit, never a price."""
        return (
            offering.devices >= self.devices
            and (self.types is None or offering.type in self.types)
            and (
                not self.regions
                or any(fnmatch.fnmatchcase(offering.region, one) for one in self.regions)
            )
        )


@dataclass(slots=True, eq=False)
class _Group:
    offering: Offering
    partly: dict[str, Machine] = field(default_factory=dict)
    empty: dict[str, Machine] = field(default_factory=dict)
    queued: set[DemandClass] = field(default_factory=set)  # classes whose heap names this group

    @property
    def has_free(self) -> bool:
        return bool(self.partly or self.empty)


class Inventory:
    """Machines whose slots may be granted now."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._classes: dict[DemandClass, list[tuple[float, str]]] = {}
        self._accepting: dict[str, list[DemandClass]] = {}
        self.free_slots = 0

    def file(self, machine: Machine, *, is_grantable: bool) -> None:
        """Puts the machine where it belongs now. To be called after each change of it."""
        group = self._groups.get(machine.offering.id)
        if group is None:
            group = self._new_group(machine.offering)
        self.unfile(machine)
        if is_grantable and machine.free:
            shelf = group.partly if machine.held else group.empty
            shelf[machine.name] = machine
            self.free_slots += len(machine.free)
            if len(group.queued) != len(self._accepting[machine.offering.id]):
                self._queue(group)

    def unfile(self, machine: Machine) -> None:
        """Takes the machine out; to be called before its free slots change."""
        group = self._groups.get(machine.offering.id)
        if group is not None:
            was = group.partly.pop(machine.name, None) or group.empty.pop(machine.name, None)
            if was is not None:
                self.free_slots -= len(machine.free)

    def find(self, wanted: DemandClass, needs: Resources) -> Machine | None:
        """A machine with room for one claim of the class, or None. Changes nothing it shows."""
        heap = self._classes.get(wanted)
        if heap is None:
            heap = self._new_class(wanted)
        unfit: list[tuple[float, str]] = []
        found = None
        while heap:
            group = self._groups[heap[0][1]]
            if not group.has_free:
                heapq.heappop(heap)
                group.queued.discard(wanted)
                continue
            found = _fitting(group, wanted.devices, needs)
            if found is not None:
                break
            unfit.append(heapq.heappop(heap))
        for entry in unfit:
            heapq.heappush(heap, entry)
        return found

    def free_for(self, wanted: DemandClass) -> int:
        """How many claims of the class could be granted, resources aside. Looks at everything."""
        return sum(
            len(machine.free) // wanted.devices
            for group in self._groups.values()
            if wanted.accepts(group.offering)
            for shelf in (group.partly, group.empty)
            for machine in shelf.values()
        )

    def idle(self, offering: str) -> tuple[Machine, ...]:
        """Grantable machines of the offering that hold no lease, longest idle first."""
        group = self._groups.get(offering)
        return () if group is None else tuple(group.empty.values())

    def _new_group(self, offering: Offering) -> _Group:
        group = self._groups[offering.id] = _Group(offering)
        accepting = [wanted for wanted in self._classes if wanted.accepts(offering)]
        self._accepting[offering.id] = accepting
        return group

    def _new_class(self, wanted: DemandClass) -> list[tuple[float, str]]:
        heap: list[tuple[float, str]] = []
        self._classes[wanted] = heap
        for group in self._groups.values():
            if wanted.accepts(group.offering):
                self._accepting[group.offering.id].append(wanted)
                if group.has_free:
                    self._queue(group)
        return heap

    def _queue(self, group: _Group) -> None:
        for wanted in self._accepting[group.offering.id]:
            if wanted not in group.queued:
                group.queued.add(wanted)
                entry = (group.offering.price_h / group.offering.devices, group.offering.id)
                heapq.heappush(self._classes[wanted], entry)


def _fitting(group: _Group, devices: int, needs: Resources) -> Machine | None:
    tried = 0
    for shelf in (group.partly, group.empty):
        for machine in shelf.values():
            if len(machine.free) >= devices and has_room(machine, needs):
                return machine
            tried += 1
            if tried == _TRIED_MACHINES:
                break
    return None


def has_room(machine: Machine, needs: Resources) -> bool:
    """Whether CPU, memory and disk stay within their targets with `needs` added."""
    has = machine.offering.resources
    if has is None or needs == NO_RESOURCES:
        return True
    used = machine.used
    return (
        used.cpu + needs.cpu <= has.cpu * CPU_TARGET
        and used.memory_bytes + needs.memory_bytes <= has.memory_bytes * MEMORY_TARGET
        and used.disk_bytes + needs.disk_bytes <= has.disk_bytes * DISK_TARGET
    )


def added(one: Resources, other: Resources, sign: int = 1) -> Resources:
    """`one` + `sign` × `other`."""
    return Resources(
        one.cpu + sign * other.cpu,
        one.memory_bytes + sign * other.memory_bytes,
        one.disk_bytes + sign * other.disk_bytes,
    )
