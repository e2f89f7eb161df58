"""What the pool's core answers, and what it wants done. Plain values."""

from dataclasses import dataclass

from nagara.contract.machine import CheckKind, Offering
from nagara.contract.replica import Lease


@dataclass(frozen=True, slots=True)
class Launch:
    """Ask the provider for this machine."""

    name: str
    epoch: int
    offering: Offering


@dataclass(frozen=True, slots=True)
class Release:
    """Ask the provider for this machine's end."""

    name: str
    epoch: int
    provider: str


@dataclass(frozen=True, slots=True)
class Check:
    """Have this machine look at itself."""

    name: str
    epoch: int
    kind: CheckKind


Action = Launch | Release | Check


@dataclass(frozen=True, slots=True)
class Granted:
    """A slot is the claimant's. Nothing may be started under it before it is durable."""

    lease: Lease
    machine: str
    address: str


@dataclass(frozen=True, slots=True)
class NoSlot:
    """Nothing is free for this claim, why, and when the next machine is expected."""

    because: str
    earliest_s: float | None  # from now; None: nothing is on its way


@dataclass(frozen=True, slots=True)
class Lost:
    """A lease whose machine is gone: its replica is no more."""

    lease: Lease
    app: str
    reason: str
