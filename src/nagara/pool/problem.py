"""What the planner is asked and what it answers. Plain values: they cross a process border.

Quantities of demand are in devices, prices in money per machine and hour.
"""

from dataclasses import dataclass

from nagara.contract.machine import NO_RESOURCES, Resources
from nagara.pool.demandclass import DemandClass


@dataclass(frozen=True, slots=True)
class Offer:
    """One offering with the pool's present machines of it."""

    id: str
    provider: str
    region: str
    type: str
    devices: int  # of one machine
    price_h: float  # effective: list price, boots that fail and reclaims included
    market: str = "on-demand"
    inventory: int = 0  # machines that are ready or in use
    in_flight: float = 0.0  # machines expected in time, discounted by boots that fail
    idle: int = 0  # machines that could be given back now
    supply: int = 0  # how many more would be granted
    release_cost: float = 0.0  # money per machine given back
    resources: Resources | None = None  # of one machine


@dataclass(frozen=True, slots=True)
class Demand:
    """One class of claims with the quantity to hold, buffer included."""

    name: str
    wanted: DemandClass
    quantity: float  # devices
    shortage_cost: float  # money per device and hour; from priority and service level
    needs: Resources = NO_RESOURCES  # of one replica, beside its devices


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every plan."""

    utilisation: float = 0.8  # of a machine's devices at peak; the design allows 0.65 to 0.80
    spread: float = 0.4  # share of a demand that one failure domain may carry at no cost
    spread_cost: float = 0.05  # money per device and hour above it
    churn_cost: float = 0.01  # money per launch or release: near-equal plans stay as they are
    ramps: tuple[tuple[str, int], ...] = ()  # launches a provider takes at once


@dataclass(frozen=True, slots=True)
class Scenario:
    """One future: demand and supply may differ from what is expected."""

    quantities: tuple[float, ...]  # by demand
    supply: tuple[int, ...]  # by offer


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything a plan depends on."""

    offers: tuple[Offer, ...]
    demands: tuple[Demand, ...]
    rules: Rules = Rules()  # a frozen dataclass
    scenarios: tuple[Scenario, ...] = ()  # none: the quantities and supplies above


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit that decided something: without it the plan would be cheaper.

    `kind` is one of "supply", "ramp", "utilisation", "demand", "spread", "idle", "shortage".
    """

    kind: str
    subject: str  # offer, provider, demand, or a place and type
    worth: float  # money per hour that one more unit would save; 0 where it is not known


@dataclass(frozen=True, slots=True)
class Plan:
    """How many machines to order and to give back, and why."""

    launches: tuple[tuple[str, int], ...] = ()  # offer, machines
    releases: tuple[tuple[str, int], ...] = ()
    shortages: tuple[tuple[str, float], ...] = ()  # demand, devices that will be missing
    bindings: tuple[Binding, ...] = ()
    source: str = "optimal"  # or "greedy", "last", "none"
    objective: float = 0.0  # of the linear programme, before rounding
    note: str = ""  # why it is not the optimal one
