"""Which slot a claim gets: free slots, indexed so that the answer takes microseconds.

Machines of one offering form a group. Inside it, partly used machines are filled first, so that
whole machines become idle and can be given back. Groups are numbered by price; which of them have
a machine with so many free devices, and which of them a class of claims accepts, are bits of
integers: the lowest bit of both is the cheapest group that will do. Called from the pool's loop
only; knows nothing of states, clocks and records.
"""

from dataclasses import dataclass, field

from nagara.contract.machine import NO_RESOURCES, Offering, Resources
from nagara.pool.demandclass import CPU_TARGET, DISK_TARGET, MEMORY_TARGET, DemandClass
from nagara.pool.machines import Machine


@dataclass(slots=True, eq=False)
class _Group:
    offering: Offering
    partly: list[dict[str, Machine]]  # by the number of free devices
    empty: dict[str, Machine] = field(default_factory=dict)
    number: int = 0  # by price, from 0
    most_free: int = 0  # devices of one machine

    def shelf(self, machine: Machine) -> dict[str, Machine]:
        """Where a machine in this condition belongs."""
        return self.partly[len(machine.free)] if machine.held else self.empty

    def fitting(self, devices: int, needs: Resources) -> Machine | None:
        """The fullest machine with room, or None. Without `needs` the first one has it."""
        for shelf in self.partly[devices:]:
            for machine in shelf.values():
                if has_room(machine, needs):
                    return machine
        # Empty machines of one offering are alike.
        first = next(iter(self.empty.values()), None)
        return first if first is not None and has_room(first, needs) else None

    def count_most_free(self) -> int:
        """The largest number of free devices of any machine."""
        if self.empty:
            return self.offering.devices
        for count in range(self.offering.devices, 0, -1):
            if self.partly[count]:
                return count
        return 0


class Inventory:
    """Machines whose slots may be granted now."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._by_price: list[_Group] = []
        self._having: list[int] = [0]  # by a number of devices: groups with so many free
        self._accepted: dict[DemandClass, int] = {}
        self._is_numbered = True  # False: a group was added since
        self.free_slots = 0

    def file(self, machine: Machine, *, is_grantable: bool) -> None:
        """Puts the machine where it belongs now. To be called after each change of it."""
        group = self._groups.get(machine.offering.id) or self._new_group(machine.offering)
        if group.shelf(machine).pop(machine.name, None) is not None:
            self.free_slots -= len(machine.free)
        if is_grantable and machine.free:
            group.shelf(machine)[machine.name] = machine
            self.free_slots += len(machine.free)
        self._note(group)

    def lend(self, machine: Machine, devices: int) -> tuple[int, ...]:
        """Takes devices of a machine just found; it is filed as one that is partly used."""
        group = self._groups[machine.offering.id]
        del group.shelf(machine)[machine.name]
        chosen = tuple(machine.free[:devices])
        del machine.free[:devices]
        self.free_slots -= devices
        if machine.free:
            group.partly[len(machine.free)][machine.name] = machine
        self._note(group)
        return chosen

    def unfile(self, machine: Machine) -> None:
        """Takes the machine out; to be called before its leases or free devices change."""
        group = self._groups.get(machine.offering.id)
        if group is not None and group.shelf(machine).pop(machine.name, None) is not None:
            self.free_slots -= len(machine.free)
            self._note(group)

    def find(self, wanted: DemandClass, needs: Resources) -> Machine | None:
        """A machine with room for one claim of the class, or None. Changes nothing."""
        groups = self._candidates(wanted)
        while groups:
            lowest = groups & -groups
            group = self._by_price[lowest.bit_length() - 1]
            machine = group.fitting(wanted.devices, needs)
            if machine is not None:
                return machine
            groups ^= lowest  # no room for these needs; others may fit
        return None

    def has_slot(self, machine: Machine, wanted: DemandClass, needs: Resources) -> bool:
        """Whether this very machine could be found for the class."""
        group = self._groups.get(machine.offering.id)
        return (
            group is not None
            and machine.name in group.shelf(machine)
            and wanted.accepts(machine.offering)
            and len(machine.free) >= wanted.devices
            and has_room(machine, needs)
        )

    def free_for(self, wanted: DemandClass) -> int:
        """How many claims of the class could be granted, resources aside."""
        groups, count = self._candidates(wanted), 0
        while groups:
            lowest = groups & -groups
            group = self._by_price[lowest.bit_length() - 1]
            for shelf in (*group.partly[wanted.devices :], group.empty):
                count += sum(len(machine.free) // wanted.devices for machine in shelf.values())
            groups ^= lowest
        return count

    def idle(self, offering: str) -> tuple[Machine, ...]:
        """Grantable machines of the offering that hold no lease, longest idle first."""
        group = self._groups.get(offering)
        return () if group is None else tuple(group.empty.values())

    def _candidates(self, wanted: DemandClass) -> int:
        """Groups that the class accepts and that have enough free devices on one machine."""
        if not self._is_numbered:
            self._number()
        accepted = self._accepted.get(wanted)
        if accepted is None:
            accepted = self._accepted[wanted] = self._accepted_by(wanted)
        return accepted & self._having[wanted.devices] if wanted.devices < len(self._having) else 0

    def _note(self, group: _Group) -> None:
        """Keeps the bits right after machines of the group have moved."""
        most = group.count_most_free()
        if most == group.most_free or not self._is_numbered:
            group.most_free = most
            return
        bit = 1 << group.number
        for count in range(min(most, group.most_free) + 1, max(most, group.most_free) + 1):
            self._having[count] ^= bit
        group.most_free = most

    def _new_group(self, offering: Offering) -> _Group:
        shelves: list[dict[str, Machine]] = [{} for _ in range(offering.devices + 1)]
        group = self._groups[offering.id] = _Group(offering, shelves)
        self._is_numbered = False
        return group

    def _number(self) -> None:
        """Numbers all groups anew and sets all bits."""
        self._by_price = sorted(
            self._groups.values(),
            key=lambda one: (one.offering.price_h / one.offering.devices, one.offering.id),
        )
        most = max(group.offering.devices for group in self._by_price)
        self._having = [0] * (most + 1)
        for number, group in enumerate(self._by_price):
            group.number = number
            for count in range(1, group.most_free + 1):
                self._having[count] |= 1 << number
        self._accepted = {wanted: self._accepted_by(wanted) for wanted in self._accepted}
        self._is_numbered = True

    def _accepted_by(self, wanted: DemandClass) -> int:
        return sum(1 << group.number for group in self._by_price if wanted.accepts(group.offering))


def has_room(machine: Machine, needs: Resources) -> bool:
    """Whether CPU, memory and disk stay within their targets with `needs` added.

    A machine that holds nothing takes whatever it can hold at all: the targets are for company.
    """
    has = machine.offering.resources
    if has is None or needs is NO_RESOURCES:
        return True
    used = machine.used
    if not machine.held:
        return (
            needs.cpu <= has.cpu
            and needs.memory_bytes <= has.memory_bytes
            and needs.disk_bytes <= has.disk_bytes
        )
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
