"""What a pool is made of, before it runs. Plain values and objects to call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nagara.contract.machine import MachineAgent, Offering, Provider
from nagara.pool.health import cpu, nvidia
from nagara.pool.health.kinds import WITHOUT_DEVICES
from nagara.pool.health.xid import XidPolicy
from nagara.pool.problem import Plan, Problem
from nagara.pool.runner import Runner
from nagara.pool.sizing import Policy

Agents = Callable[[str, str], MachineAgent]  # by name and address; must not block


class Planning(Protocol):
    """Who makes plans."""

    async def plan(self, problem: Problem) -> Plan:
        """A plan for the problem, always."""
        ...


def required_checks(type_: str) -> frozenset[str]:
    """Checks without which a machine of a device type is not used."""
    return cpu.REQUIRED if type_ in WITHOUT_DEVICES else cpu.REQUIRED | nvidia.REQUIRED


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """One pool.

    Attributes:
        own: what this process's own machine offers; None: it runs no replicas.
        agents: reaches the agent of a machine, the own one's with an empty address.
        required: checks without which a machine is not used, by device type.
        xids: what device events mean.
    """

    own: Offering | None
    agents: Agents
    providers: tuple[Provider, ...] = ()
    policy: Policy = field(default_factory=Policy)
    required: Callable[[str], frozenset[str]] = required_checks
    planning: Planning = field(default_factory=Runner)
    xids: XidPolicy = field(default_factory=XidPolicy)
