"""What a claim accepts. Pure."""

import fnmatch
from dataclasses import dataclass
from typing import Protocol


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


ANY = DemandClass()
