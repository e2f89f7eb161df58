"""This machine as the pool sees it: its checks, its monitor, and the leases of its replicas.

Belongs to the agent's loop. Leases are the keeper's affair, which ends replicas without us; here
an order of the pool becomes a certainty, because what is left of an ended replica is cleared away
before the answer.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from nagara import __version__
from nagara.base.errors import NagaraError
from nagara.contract.machine import (
    CheckKind,
    HealthReport,
    MachineUnreachableError,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.contract.node import Node
from nagara.sandbox.fence import devices_of
from nagara.sandbox.keeper_client import KeeperClient

Checks = Callable[[CheckKind], Awaitable[HealthReport]]


class LocalMachine:
    """The `MachineAgent` protocol carried out here.

    Args:
        node: the node of this machine.
        keeper: its keeper.
        checks: runs the checks of a kind.
        vitals: what the machine's monitor has found since the mark that is given.
    """

    def __init__(
        self, node: Node, keeper: KeeperClient, checks: Checks, vitals: Callable[[str], Vitals]
    ) -> None:
        self._node = node
        self._keeper = keeper
        self._checks = checks
        self._vitals = vitals

    async def check(self, kind: CheckKind) -> HealthReport:
        return await self._checks(kind)

    async def vitals(self, heard: str) -> Vitals:
        return self._vitals(heard)

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        try:
            mark_s, refused = await self._keeper.renew([asdict(one) for one in renewals])
        except NagaraError as error:
            raise MachineUnreachableError(f"its keeper does not answer: {error.what}") from error
        return RenewalAnswer(mark_s, refused, __version__)

    async def fence(self, slot: str, epoch: int) -> None:
        try:
            await self._keeper.fence(slot, epoch)
            devices = devices_of(slot)
            for status in await self._node.replicas():
                lease = status.lease
                if lease.epoch < epoch and devices & devices_of(lease.slot):
                    await self._node.stop(status.replica, grace_s=0.0)
        except NagaraError as error:
            raise MachineUnreachableError(f"{slot} is not fenced: {error.what}") from error
