"""Ray as the control process sees it: a `ClusterEngine` over a bridge that is started at need.

Belongs to one event loop. A bridge that ends, or does not answer in time, is replaced with the
next question; what was asked of it has an unknown outcome then.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import socket
import sys
from dataclasses import dataclass
from typing import Any

from nagara.base.errors import UsageError
from nagara.cli.cluster.address import hint_for
from nagara.contract.cluster import EngineMachine, MachineKind
from nagara.contract.machine import NoCapacityError, ProviderError

CONNECT_S, ANSWER_S = 60.0, 60.0
_CLOSE_S = 5.0
_LINE_BYTES = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RaySettings:
    """How a Ray cluster is used.

    Attributes:
        address: as `ray.init` takes it: `auto`, `HOST:PORT`, `ray://HOST:PORT`.
        token: of nagara's cluster, for the agents.
        port: where agents listen; 0: anywhere.
        certificates: a folder on each of the machines.
        state: the state folder on each of the machines; None: as nagara finds it there.
        leaves_own_out: the machine of the control process is in use without Ray.
    """

    address: str
    token: str
    port: int = 0
    certificates: str | None = None
    state: str | None = None
    leaves_own_out: bool = True


def require_ray() -> None:
    """Raises `UsageError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "Ray is not installed: machines of a cluster need it",
            hint="pip install 'nagara[cluster]', here and on each machine",
        )


class RayEngine:
    """One Ray cluster."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._bridge: _Bridge | None = None
        self._turn = asyncio.Lock()
        self._is_asking = False  # the autoscaler was asked for something

    async def close(self) -> None:
        """Leaves the cluster's machines as they are; what has not come is no longer asked for."""
        if self._is_asking and self._bridge is not None:
            with contextlib.suppress(ProviderError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self.ask_for(())
        await self._drop()

    async def machines(self) -> tuple[EngineMachine, ...]:
        return tuple(EngineMachine(**one) for one in await self._call("machines"))

    async def lend(self, machine: str, name: str) -> None:
        settings = self._settings
        await self._call(
            "lend", machine=machine, name=name, token=settings.token, port=settings.port,
            certificates=settings.certificates,
        )  # fmt: skip

    async def take_back(self, machine: str) -> None:
        await self._call("take_back", machine=machine)

    async def ask_for(self, kinds: tuple[MachineKind, ...]) -> str:
        bundles = []
        for kind in kinds:
            bundle = {"CPU": kind.cpu}
            if kind.devices:
                bundle |= {"GPU": float(kind.devices)}
                if kind.type != "gpu":  # a machine has one of its type, however many devices
                    bundle[f"accelerator_type:{kind.type.upper()}"] = 1.0
            bundles.append(bundle)
        self._is_asking = bool(bundles)
        return str(await self._call("ask_for", bundles=bundles))

    async def _call(self, call: str, **arguments: Any) -> Any:
        async with self._turn:
            if self._bridge is None:
                self._bridge = await _Bridge.started()
                await self._asked(
                    "connect", CONNECT_S, address=self._settings.address,
                    leaves_own_out=self._settings.leaves_own_out, state=self._settings.state,
                )  # fmt: skip
            return await self._asked(call, ANSWER_S, **arguments)

    async def _asked(self, call: str, limit_s: float, **arguments: Any) -> Any:
        assert self._bridge is not None
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._bridge.ask(call, arguments)
        except (TimeoutError, OSError, ValueError) as error:
            await self._drop()
            why = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else error
            raise self._unclear(f"Ray does not answer: {why}") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._drop())  # its answer would be taken for the next one's
            raise
        if (fault := reply.get("error")) is None:
            return reply["result"]
        if call == "connect":
            await self._drop()
            hint = hint_for(fault["what"], self._settings.address)
            raise self._unclear(f"Ray cannot be reached: {fault['what']}", hint)
        if fault["kind"] == "refused":
            raise NoCapacityError(fault["what"], where=self._settings.address)
        raise self._unclear(fault["what"])

    def _unclear(self, what: str, hint: str | None = None) -> ProviderError:
        return ProviderError(what, where=f"Ray at {self._settings.address}", hint=hint)

    async def _drop(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            await bridge.end()


class _Bridge:
    """A running bridge."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls) -> "_Bridge":
        own, its = socket.socketpair()
        with its:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nagara.cli.cluster.bridge", str(its.fileno())),
                pass_fds=[its.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=own, limit=_LINE_BYTES)
        return cls(process, reader, writer)

    async def ask(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._writer.write(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")
        await self._writer.drain()
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("its process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        self._writer.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
