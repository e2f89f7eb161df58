"""The machine table: every machine the pool knows, and what still has to be written down.

A change is a compare-and-set on (name, epoch). It is applied in memory and put on the list of
writes; whoever acts on it takes the list, makes it durable, and only then acts. Called from the
pool's loop only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from nagara.contract.machine import NO_RESOURCES, CheckKind, Offering, Resources
from nagara.pool.demandclass import ANY, DemandClass
from nagara.pool.errors import StaleEpochError, UnknownMachineError
from nagara.pool.lease import LeaseClock, machine_of
from nagara.pool.states import DEADLINES_S, MachineEvent, MachineState, after


@dataclass(slots=True)
class HeldSlot:
    """A granted lease as the pool remembers it."""

    slot: str
    epoch: int
    app: str
    needs: Resources
    wanted: DemandClass
    is_certain: bool = True  # False: taken from the record, nobody has claimed it yet
    free_at_s: float | None = None  # given back without a confirmation: grantable from then on


@dataclass(slots=True, eq=False)
class Machine:
    """One machine. Changed through `MachineTable.move` and by the grants of its slots."""

    name: str
    offering: Offering
    state: MachineState
    epoch: int
    since_s: float  # boot-time clock of this process's machine
    reason: str = ""
    address: str = ""
    after_drain: MachineEvent | None = None  # what follows once it is empty
    diagnosis: CheckKind = CheckKind.MEDIUM  # how thoroughly, when it comes to that
    kept_out: frozenset[str] = frozenset()  # why it is healthy enough for its leases alone
    is_silent: bool = False  # its agent did not answer when it was last asked
    is_own: bool = False  # the pool's own process runs on it
    absences: int = 0  # lists in a row that lacked it
    absent_since_s: float = 0.0  # when the first of them was asked for
    heard_s: float = -math.inf  # when its agent last answered
    version: str = ""  # of its agent, as last heard
    requested_s: float = 0.0
    release_asked_s: float | None = None
    free: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # newest ever granted, by device
    held: dict[str, HeldSlot] = field(default_factory=dict)
    used: Resources = NO_RESOURCES
    clock: LeaseClock | None = None

    @property
    def is_kept_out(self) -> bool:
        """Whether it gets no new leases, for one reason or several."""
        return bool(self.kept_out)

    def deadline_s(self) -> float | None:
        """When this state has lasted too long; None for READY and GONE."""
        allowed_s = DEADLINES_S.get(self.state)
        return None if allowed_s is None else self.since_s + allowed_s


@dataclass(frozen=True, slots=True)
class MachineRow:
    """What is kept of a machine across restarts."""

    name: str
    offering: Offering
    state: MachineState
    epoch: int
    reason: str
    address: str
    after_drain: MachineEvent | None
    diagnosis: CheckKind = CheckKind.MEDIUM
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """What is kept of a grant. `app` None: given back; the epoch is kept."""

    slot: str
    epoch: int
    app: str | None
    needs: Resources = NO_RESOURCES
    wanted: DemandClass = ANY


@dataclass(frozen=True, slots=True)
class Writes:
    """One transaction: all of it becomes durable, or nothing."""

    machines: tuple[MachineRow, ...] = ()
    leases: tuple[LeaseRow, ...] = ()
    gone: tuple[str, ...] = ()  # machines whose rows, and whose slots' rows, are no longer needed

    def __bool__(self) -> bool:
        return bool(self.machines or self.leases or self.gone)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a pool is rebuilt from."""

    pool: str  # the prefix of this pool's machine names
    machines: tuple[MachineRow, ...] = ()
    leases: tuple[LeaseRow, ...] = ()


class MachineTable:
    """All machines by name. Machines that are gone are forgotten; their names never return."""

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._changed: dict[str, None] = {}
        self._leases: dict[str, HeldSlot | LeaseRow] = {}
        self._gone: dict[str, None] = {}
        self._by_offering: dict[str, dict[MachineState, dict[str, Machine]]] = {}
        self._offerings: dict[str, Offering] = {}
        self._accepted: dict[DemandClass, tuple[int, list[str]]] = {}

    def __iter__(self) -> Iterator[Machine]:
        return iter(tuple(self._machines.values()))

    def __len__(self) -> int:
        return len(self._machines)

    def __contains__(self, name: str) -> bool:
        return name in self._machines

    def get(self, name: str) -> Machine | None:
        """The machine of that name, or None."""
        return self._machines.get(name)

    def named(self, name: str) -> Machine:
        """The machine of that name; raises `UnknownMachineError`."""
        machine = self._machines.get(name)
        if machine is None:
            raise UnknownMachineError(
                f"no machine is called {name!r}", hint="`nagara pool status` lists them"
            )
        return machine

    def add(self, machine: Machine, *, is_known: bool = False) -> None:
        """Takes a machine in; `is_known`: it comes from the record, so nothing is to be written."""
        assert machine.name not in self._machines, machine.name
        self._machines[machine.name] = machine
        self._offerings.setdefault(machine.offering.id, machine.offering)
        states = self._by_offering.setdefault(machine.offering.id, {})
        states.setdefault(machine.state, {})[machine.name] = machine
        if not is_known:
            self._changed[machine.name] = None

    def move(
        self, name: str, epoch: int, event: MachineEvent, now_s: float, reason: str = ""
    ) -> Machine:
        """Applies `event` if nobody changed the machine since its epoch was read.

        Raises:
            StaleEpochError, UnknownMachineError, IllegalEventError: nothing was changed.
        """
        machine = self.named(name)
        if machine.epoch != epoch:
            raise StaleEpochError(f"epoch {epoch} is old, now {machine.epoch}", where=name)
        target = after(machine.state, event)
        states = self._by_offering[machine.offering.id]
        del states[machine.state][name]
        if target is not MachineState.GONE:
            states.setdefault(target, {})[name] = machine
        machine.state = target
        machine.epoch += 1
        machine.since_s = now_s
        machine.reason = reason
        self._changed[name] = None
        if machine.state is MachineState.GONE:
            del self._machines[name]
            self._changed.pop(name, None)
            for slot in [slot for slot in self._leases if slot.startswith(f"{name}/")]:
                del self._leases[slot]
            self._gone[name] = None
        return machine

    def accepted_by(self, wanted: DemandClass) -> Iterator[tuple[MachineState, dict[str, Machine]]]:
        """The machines a class of claims would take, by offering and state."""
        known, offerings = self._accepted.get(wanted, (0, []))
        if known != len(self._offerings):
            offerings = [id_ for id_, one in self._offerings.items() if wanted.accepts(one)]
            self._accepted[wanted] = (len(self._offerings), offerings)
        for id_ in offerings:
            yield from self._by_offering[id_].items()

    def touch(self, machine: Machine) -> None:
        """Something of the machine that is kept has changed without an event."""
        self._changed[machine.name] = None

    def forget(self, name: str) -> None:
        """Nothing is kept any longer of a machine that was in the record."""
        self._gone[name] = None

    def write_lease(self, slot: str, written: HeldSlot | LeaseRow) -> None:
        """A grant or its end is to be written."""
        self._leases[slot] = written

    def take_writes(self) -> Writes:
        """What is to be made durable before anything is done about it; empties the list."""
        rows = tuple(_row(self._machines[name]) for name in self._changed)
        leases = tuple(_lease_row(one) for one in self._leases.values())
        writes = Writes(rows, leases, tuple(self._gone))
        self._changed, self._leases, self._gone = {}, {}, {}
        return writes

    def put_back(self, writes: Writes) -> None:
        """These could not be made durable: they are to be written with the next ones."""
        for row in writes.machines:
            if row.name in self._machines:
                self._changed[row.name] = None
        for lease in writes.leases:
            if machine_of(lease.slot) in self._machines:
                self._leases.setdefault(lease.slot, lease)
        self._gone = {**dict.fromkeys(writes.gone), **self._gone}


def restored(row: MachineRow, now_s: float) -> Machine:
    """A machine as an earlier process left it; its deadlines begin anew."""
    return Machine(
        name=row.name,
        offering=row.offering,
        state=row.state,
        epoch=row.epoch,
        since_s=now_s,
        reason=row.reason,
        address=row.address,
        after_drain=row.after_drain,
        diagnosis=row.diagnosis,
        kept_out=frozenset(row.kept_out),
        requested_s=now_s,
    )


def _lease_row(one: HeldSlot | LeaseRow) -> LeaseRow:
    if isinstance(one, LeaseRow):
        return one
    return LeaseRow(one.slot, one.epoch, one.app, one.needs, one.wanted)


def _row(machine: Machine) -> MachineRow:
    return MachineRow(
        machine.name,
        machine.offering,
        machine.state,
        machine.epoch,
        machine.reason,
        machine.address,
        machine.after_drain,
        machine.diagnosis,
        tuple(sorted(machine.kept_out)),
    )
