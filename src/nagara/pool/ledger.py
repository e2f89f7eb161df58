"""The pool's durable record: machines, leases, facts such as the latest plan.

Where it is kept is its owner's affair (control keeps it in its state); here is what a record must
do, one that lives as long as the process, and how values are written as JSON.
"""

from typing import Any, Protocol

from nagara.contract.machine import Offering, Resources
from nagara.pool.demandclass import DemandClass
from nagara.pool.machines import LeaseRow, MachineRow, Saved, Writes


class Record(Protocol):
    """Where the pool writes before it acts."""

    async def read(self) -> Saved:
        """Everything."""
        ...

    async def write(self, writes: Writes) -> None:
        """Makes all of it durable, or raises and leaves all of it."""
        ...

    async def fact(self, key: str) -> Any:
        """A JSON value kept under a name, or None."""
        ...

    async def put_fact(self, key: str, value: object) -> None:
        """Keeps a JSON value: the latest plan, what was measured."""
        ...


class MemoryLedger:
    """A record that lives as long as the process: for simulations and tests."""

    def __init__(self, pool: str = "n0") -> None:
        self._pool = pool
        self._machines: dict[str, MachineRow] = {}
        self._leases: dict[str, LeaseRow] = {}

    def read(self) -> Saved:
        """Everything."""
        return Saved(self._pool, tuple(self._machines.values()), tuple(self._leases.values()))

    def write(self, writes: Writes) -> None:
        """Keeps it."""
        for row in writes.machines:
            self._machines[row.name] = row
        for lease in writes.leases:
            self._leases[lease.slot] = lease
        for name in writes.gone:
            self._machines.pop(name, None)
            for slot in [slot for slot in self._leases if slot.startswith(f"{name}/")]:
                del self._leases[slot]


def offering_from(document: dict[str, Any]) -> Offering:
    """The inverse of `dataclasses.asdict` for an offering."""
    resources = document.get("resources")
    return Offering(
        **{**document, "resources": None if resources is None else Resources(**resources)}
    )


def wanted_document(wanted: DemandClass) -> dict[str, Any]:
    """A class of claims as JSON."""
    types = None if wanted.types is None else sorted(wanted.types)
    return {"types": types, "regions": list(wanted.regions), "devices": wanted.devices}


def wanted_from(document: dict[str, Any]) -> DemandClass:
    """The inverse of `wanted_document`."""
    types = document["types"]
    return DemandClass(
        None if types is None else frozenset(types),
        tuple(document["regions"]),
        document["devices"],
    )
