"""What a claim accepts. Pure."""

import fnmatch
import math
from dataclasses import dataclass, field
from typing import Protocol

from nagara.contract.machine import Resources


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
    _hash: int = field(init=False, repr=False, compare=False)  # asked for several times a claim

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.types, self.regions, self.devices)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["DemandClass"], tuple[object, ...]]:
        """Made anew on the other side: texts have other hashes in another process."""
        return DemandClass, (self.types, self.regions, self.devices)

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


CPU_TARGET, MEMORY_TARGET, DISK_TARGET = 0.85, 0.90, 0.85  # of what a machine has; never all


def replicas_by_resources(has: Resources | None, needs: Resources) -> float:
    """How many replicas fit a machine's CPU, memory and disk below their targets."""
    if has is None:
        return math.inf
    return min(
        has.cpu * CPU_TARGET / needs.cpu if needs.cpu else math.inf,
        has.memory_bytes * MEMORY_TARGET / needs.memory_bytes if needs.memory_bytes else math.inf,
        has.disk_bytes * DISK_TARGET / needs.disk_bytes if needs.disk_bytes else math.inf,
    )


ANY = DemandClass()
