"""A distributed engine whose machines a test adds, takes away and lets others use."""

from dataclasses import replace

from nagara.contract.cluster import EngineMachine, MachineKind
from nagara.contract.machine import NoCapacityError, ProviderError


class FakeEngine:
    """A `ClusterEngine` in memory.

    Attributes:
        present: the machines by id; a test changes it.
        busy: ids of machines that other jobs use.
        asked: what the autoscaler was last asked for.
        obstacle: why nothing of that is on its way.
    """

    def __init__(self, *machines: EngineMachine) -> None:
        self.present = {one.id: one for one in machines}
        self.busy: set[str] = set()
        self.asked: tuple[MachineKind, ...] = ()
        self.obstacle = ""
        self.is_reachable = True

    async def machines(self) -> tuple[EngineMachine, ...]:
        self._reach()
        return tuple(self.present.values())

    async def lend(self, machine: str, name: str) -> None:
        self._reach()
        one = self.present.get(machine)
        if one is None or one.lent_as not in ("", name) or machine in self.busy:
            raise NoCapacityError("somebody else has it", where=machine)
        self.present[machine] = replace(one, lent_as=name, address=f"tcp://{machine}:9300")

    async def take_back(self, machine: str) -> None:
        self._reach()
        if (one := self.present.get(machine)) is not None:
            self.present[machine] = replace(one, lent_as="", address="")

    async def ask_for(self, kinds: tuple[MachineKind, ...]) -> str:
        self._reach()
        self.asked = kinds
        return self.obstacle if kinds else ""

    def _reach(self) -> None:
        if not self.is_reachable:
            raise ProviderError("the fake engine is out of reach")


def a_machine(name: str, *, type_: str = "cpu", devices: int = 0) -> EngineMachine:
    """One with 8 cores and 32 GiB."""
    return EngineMachine(
        id=name, type=type_, devices=devices, cpu=8.0, memory_bytes=32 << 30, region="",
        disk_bytes=100 << 30,
    )  # fmt: skip
