"""The `MachineAgent` protocol spoken to an agent in another process. Belongs to one event loop."""

from pathlib import Path
from typing import Any

from nagara.contract.machine import (
    CheckKind,
    HealthReport,
    MachineUnreachableError,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.contract.node import NodeError
from nagara.node.mandate import Mandate
from nagara.node.remote_node import RemoteNode
from nagara.node.transport import Transport


class RemoteMachine:
    """A machine whose agent is reached by a transport; a path is that of its Unix socket."""

    def __init__(self, transport: Transport | Path, mandate: Mandate | None = None) -> None:
        self._node = RemoteNode(transport, mandate)

    async def check(self, kind: CheckKind) -> HealthReport:
        return await self._call("check", kind=kind)  # type: ignore[no-any-return]

    async def vitals(self, heard: str) -> Vitals:
        return await self._call("vitals", heard=heard)  # type: ignore[no-any-return]

    async def renew(self, renewals: tuple[Renewal, ...]) -> RenewalAnswer:
        return await self._call("renew", renewals=renewals)  # type: ignore[no-any-return]

    async def fence(self, slot: str, epoch: int) -> None:
        await self._call("fence", slot=slot, epoch=epoch)

    async def _call(self, method: str, **arguments: Any) -> Any:
        try:
            return await self._node.call(method, **arguments)
        except NodeError as error:
            raise MachineUnreachableError(error.what, where=error.where) from error
