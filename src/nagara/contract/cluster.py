"""The protocol between the pool and a distributed engine that has machines already, such as Ray.

The engine knows which machines are there and can have nagara's agent run on them. What is done on
a machine afterwards goes to its agent directly: an engine that is away stops no serving.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineMachine:
    """A machine of the engine that is there."""

    id: str  # of the engine's own making; another one after the machine has joined again
    type: str  # of its devices: "h100", ..., or "cpu"
    devices: int  # 0: it has none
    cpu: float
    memory_bytes: int
    region: str
    disk_bytes: int = 0
    lent_as: str = ""  # under which name the pool has it; empty: it is not lent
    address: str = ""  # of its agent; empty while that is not running
    problem: str = ""  # why it cannot be lent, or why its agent does not run


@dataclass(frozen=True, slots=True)
class MachineKind:
    """What the engine may be asked to add: as a machine of its own."""

    type: str
    devices: int
    cpu: float
    memory_bytes: int = 0


class ClusterEngine(Protocol):
    """Methods may raise `ProviderError`: then what has happened is unknown."""

    async def machines(self) -> tuple[EngineMachine, ...]:
        """All that are alive, but for one that is in use without the engine."""
        ...

    async def lend(self, machine: str, name: str) -> None:
        """Keeps a machine's resources for the pool and has an agent run there.

        It is remembered on the machine, so that it outlives the engine. Twice is once.

        Raises:
            NoCapacityError: it is gone, lent under another name, or somebody else works there.
        """
        ...

    async def take_back(self, machine: str) -> None:
        """Ends the agent; the machine is the engine's again. One that is not lent is no error."""
        ...

    async def ask_for(self, kinds: tuple[MachineKind, ...]) -> str:
        """What the pool waits for in all: the engine's autoscaler adds it, if it has one.

        Asked again and again while something is waited for. Returns why nothing is on its way
        at present, which may change within a minute; empty: something is, or nothing is wanted.
        """
        ...
