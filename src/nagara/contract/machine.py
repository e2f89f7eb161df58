"""Messages and protocols between the pool, who lends machines, and the machines themselves.

A `Provider` has machines to give; a `MachineAgent` answers on one of them. Durations are seconds,
sizes bytes, prices any one currency per hour.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from nagara.base.errors import NagaraError


class ProviderError(NagaraError):
    """The provider did not answer usefully: whether a machine exists is unknown."""


class NoCapacityError(ProviderError):
    """The provider has no such machine at present; certainly none was made."""


class ProviderRefusedError(ProviderError):
    """The provider will not do it until a person acts (quota, credentials); none was made."""


class MachineUnreachableError(NagaraError):
    """The machine's agent does not answer; what happens on the machine is unknown."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a replica needs of a machine's host part, or what the machine has of it."""

    cpu: float = 0.0  # cores
    memory_bytes: int = 0
    disk_bytes: int = 0


NO_RESOURCES = Resources()


@dataclass(frozen=True, slots=True)
class Offering:
    """One kind of machine that can be had in one place."""

    id: str  # unique over all providers
    provider: str
    region: str
    type: str  # of the device: "h100", "cpu", ...
    devices: int  # a machine has as many slots
    price_h: float  # list price of the whole machine
    market: str = "on-demand"  # or "spot"
    resources: Resources | None = None  # None: not said, so not a reason to refuse
    stock: int | None = None  # advertised; believed only as an upper bound


class Presence(StrEnum):
    """How far a provider says that a machine has come."""

    PENDING = "pending"
    RUNNING = "running"
    REFUSED = "refused"  # accepted, and yet it will not come: certainly none was made


@dataclass(frozen=True, slots=True)
class ProviderMachine:
    """A machine as its provider lists it."""

    name: str  # the one given to `launch`
    offering: str
    presence: Presence
    address: str = ""  # how its agent is reached; empty for this machine
    problem: str = ""  # why it is refused


class Provider(Protocol):
    """Who has machines. Any method may raise `ProviderError` when the outcome is unknown."""

    @property
    def name(self) -> str:
        """As in `Offering.provider`."""
        ...

    async def offerings(self) -> tuple[Offering, ...]:
        """What can be had at present, with present prices."""
        ...

    async def launch(self, name: str, offering: Offering) -> None:
        """Asks for one machine that will be listed under `name`. Returns when it is accepted.

        Raises:
            NoCapacityError, ProviderRefusedError: certainly no machine was made.
        """
        ...

    async def release(self, name: str) -> None:
        """Asks for the machine's end; an unknown name is no error. The list alone confirms it."""
        ...

    async def machines(self) -> tuple[ProviderMachine, ...]:
        """Every machine that exists and costs money, whoever asked for it."""
        ...


class CheckKind(StrEnum):
    """How thoroughly a machine is looked at."""

    BOOT = "boot"  # at most 20 s
    MEDIUM = "medium"  # about 2 min, after a replica failed for a device reason
    HEAVY = "heavy"  # up to 75 min, idle machines only


class Outcome(StrEnum):
    """A check that could not be made says nothing about the machine."""

    PASS = "pass"  # noqa: S105  # no password
    FAIL = "fail"
    DID_NOT_RUN = "did not run"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one machine."""

    name: str
    outcome: Outcome
    detail: str = ""
    elapsed_s: float = 0.0
    figure: float | None = None  # what was counted or measured, to be compared with others


@dataclass(frozen=True, slots=True)
class HealthReport:
    """All checks of one round."""

    kind: CheckKind
    results: tuple[CheckResult, ...]


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """What a device's driver wrote into the kernel log: NVIDIA's Xid."""

    code: int
    device: str  # PCI address
    text: str


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a machine's monitor has found that was not heard yet.

    `rounds` rises with each round the monitor finished: one that stands still says nothing.
    `mark` goes back with the next question: events up to it have arrived and are told no more.
    """

    rounds: int
    events: tuple[DeviceEvent, ...]
    results: tuple[CheckResult, ...]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Renewal:
    """Prolongs a lease to `mark_s` + `ttl_s` on the machine's own clock.

    `mark_s` is a reading of that clock which the machine gave earlier: a message that was delayed
    on its way prolongs nothing.
    """

    slot: str
    epoch: int
    mark_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RenewalAnswer:
    """A new reading of the machine's clock, and the slots whose epoch was too old.

    `version` is that of nagara there.
    """

    mark_s: float
    refused: tuple[str, ...] = ()
    version: str = ""


class MachineAgent(Protocol):
    """What the pool asks of a machine. Methods raise `MachineUnreachableError`."""

    async def check(self, kind: CheckKind) -> HealthReport:
        """Runs the checks of that kind."""
        ...

    async def vitals(self, heard: str) -> Vitals:
        """What the monitor saw since the answer whose `mark` is `heard`; empty: there is none."""
        ...

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        """Prolongs leases; with none it only asks for a mark."""
        ...

    async def fence(self, slot: str, epoch: int) -> None:
        """Ends what runs under an epoch below `epoch` and refuses such from now on."""
        ...
