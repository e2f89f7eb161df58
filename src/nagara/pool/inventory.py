"""Which slot a claim gets: free slots, indexed so that the answer takes microseconds.

Machines of one offering form a group. Inside it, partly used machines are filled first, so that
whole machines become idle and can be given back. For every class of claims a heap holds the
groups that have something free, cheapest first; an entry that has become wrong is dropped when
it comes up. Called from the pool's loop only; knows nothing of states, clocks and records.
"""

import heapq
from dataclasses import dataclass, field

from nagara.contract.machine import NO_RESOURCES, Offering, Resources
from nagara.pool.demandclass import CPU_TARGET, DISK_TARGET, MEMORY_TARGET, DemandClass
from nagara.pool.machines import Machine

_TRIED_MACHINES = 32  # of one group, when resources decide


@dataclass(slots=True, eq=False)
class _Group:
    offering: Offering
    partly: list[dict[str, Machine]]  # by the number of free devices
    empty: dict[str, Machine] = field(default_factory=dict)
    accepting: "list[_Queue]" = field(default_factory=list)  # classes that take its machines
    queued: set[int] = field(default_factory=set)  # classes whose heap names this group
    free: int = 0  # devices, on all shelves

    def shelf(self, machine: Machine) -> dict[str, Machine]:
        """Where a machine in this condition belongs."""
        return self.partly[len(machine.free)] if machine.held else self.empty

    def fitting(self, devices: int, needs: Resources) -> Machine | None:
        """The fullest machine with room, or None."""
        tried = 0
        for shelf in (*self.partly[devices:], self.empty):
            for machine in shelf.values():
                if has_room(machine, needs):
                    return machine
                tried += 1
                if tried == _TRIED_MACHINES:
                    break
        return None

    def has_free(self, devices: int) -> bool:
        """Whether any machine has that many free devices."""
        return bool(self.empty) or any(self.partly[devices:])


@dataclass(slots=True, eq=False)
class _Queue:
    """One class of claims: its groups that may have something free, cheapest first."""

    number: int
    wanted: DemandClass
    heap: list[tuple[float, str, _Group]] = field(default_factory=list)

    def push(self, group: _Group) -> None:
        group.queued.add(self.number)
        price = group.offering.price_h / group.offering.devices
        heapq.heappush(self.heap, (price, group.offering.id, group))


class Inventory:
    """Machines whose slots may be granted now."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._queues: dict[DemandClass, _Queue] = {}
        self.free_slots = 0

    def file(self, machine: Machine, *, is_grantable: bool) -> None:
        """Puts the machine where it belongs now. To be called after each change of it."""
        group = self._groups.get(machine.offering.id)
        if group is None:
            group = self._new_group(machine.offering)
        self.unfile(machine)
        if is_grantable and machine.free:
            count = len(machine.free)
            group.shelf(machine)[machine.name] = machine
            group.free += count
            self.free_slots += count
            if len(group.queued) != len(group.accepting):
                for queue in group.accepting:
                    if queue.number not in group.queued and queue.wanted.devices <= count:
                        queue.push(group)

    def unfile(self, machine: Machine) -> None:
        """Takes the machine out; to be called before its leases or free devices change."""
        group = self._groups.get(machine.offering.id)
        if group is not None and group.shelf(machine).pop(machine.name, None) is not None:
            group.free -= len(machine.free)
            self.free_slots -= len(machine.free)

    def find(self, wanted: DemandClass, needs: Resources) -> Machine | None:
        """A machine with room for one claim of the class, or None. Changes nothing it shows."""
        queue = self._queues.get(wanted) or self._new_queue(wanted)
        heap, devices = queue.heap, wanted.devices
        unfit: list[_Group] = []
        found = None
        while heap:
            group = heap[0][2]
            if group.free >= devices:
                found = group.fitting(devices, needs)
                if found is not None:
                    break
                if group.has_free(devices):
                    unfit.append(group)  # for these needs; others may fit
            heapq.heappop(heap)
            group.queued.discard(queue.number)
        for group in unfit:
            queue.push(group)
        return found

    def free_for(self, wanted: DemandClass) -> int:
        """How many claims of the class could be granted, resources aside."""
        queue = self._queues.get(wanted) or self._new_queue(wanted)
        return sum(
            len(machine.free) // wanted.devices
            for _, _, group in queue.heap
            for shelf in (*group.partly[wanted.devices :], group.empty)
            for machine in shelf.values()
        )

    def idle(self, offering: str) -> tuple[Machine, ...]:
        """Grantable machines of the offering that hold no lease, longest idle first."""
        group = self._groups.get(offering)
        return () if group is None else tuple(group.empty.values())

    def _new_group(self, offering: Offering) -> _Group:
        shelves: list[dict[str, Machine]] = [{} for _ in range(offering.devices + 1)]
        group = self._groups[offering.id] = _Group(offering, shelves)
        group.accepting = [one for one in self._queues.values() if one.wanted.accepts(offering)]
        return group

    def _new_queue(self, wanted: DemandClass) -> _Queue:
        queue = self._queues[wanted] = _Queue(len(self._queues), wanted)
        for group in self._groups.values():
            if wanted.accepts(group.offering):
                group.accepting.append(queue)
                if group.has_free(wanted.devices):
                    queue.push(group)
        return queue


def has_room(machine: Machine, needs: Resources) -> bool:
    """Whether CPU, memory and disk stay within their targets with `needs` added."""
    has = machine.offering.resources
    if has is None or needs is NO_RESOURCES:
        return True
    used = machine.used
    return (
        used.cpu + needs.cpu <= has.cpu * CPU_TARGET
        and used.memory_bytes + needs.memory_bytes <= has.memory_bytes * MEMORY_TARGET
        and used.disk_bytes + needs.disk_bytes <= has.disk_bytes * DISK_TARGET
    )


def added(one: Resources, other: Resources, sign: int = 1) -> Resources:
    """`one` + `sign` × `other`."""
    if other is NO_RESOURCES:
        return one
    return Resources(
        one.cpu + sign * other.cpu,
        one.memory_bytes + sign * other.memory_bytes,
        one.disk_bytes + sign * other.disk_bytes,
    )
