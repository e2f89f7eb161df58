"""Messages between an agent and its callers: requests of one connection, one after the other.

A request is a line of JSON, `{"method", "arguments", "epoch"}`; the epoch is that of the control
process that asks, and is left out by whoever is none. A reply is a line too: `{"result"}` or
`{"error": {"kind", "what", "where", "hint"}}`; `exits` goes on replying. Nothing is sent before
the reply has come; closing the connection cancels the call.

`dial` is a connection's last. Over a Unix socket its reply carries the descriptor of a connected
socket (SCM_RIGHTS); over TCP the connection itself is the replica's from the reply on, as
`nagara/node/network/forwarding.py` says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Base64Bytes, TypeAdapter

from nagara.base.errors import NagaraError
from nagara.contract import node as contract
from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.machine import CheckKind, HealthReport, Renewal, RenewalAnswer, Vitals
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    DiskReport,
    ImageOrder,
    ImageReport,
    NodeFacts,
    ReplicaStatus,
    ReplicaUsage,
    SnapshotStatus,
    StartOrder,
    StartReport,
)

MESSAGE_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a protocol as it crosses the wire."""

    arguments: dict[str, TypeAdapter[Any]]
    result: TypeAdapter[Any]


def _method(result: Any, **arguments: Any) -> Method:
    adapters = {name: TypeAdapter(kind) for name, kind in arguments.items()}
    return Method(adapters, TypeAdapter(result))


MACHINE_METHODS: dict[str, Method] = {  # of the `MachineAgent` protocol
    "check": _method(HealthReport, kind=CheckKind),
    "vitals": _method(Vitals, heard=str),
    "renew": _method(RenewalAnswer, renewals=tuple[Renewal, ...]),
    "fence": _method(None, slot=str, epoch=int),
}

METHODS: dict[str, Method] = {
    **MACHINE_METHODS,
    "facts": _method(NodeFacts),
    "use_caches": _method(NodeFacts, caches=tuple[str, ...]),
    "bring_image": _method(ImageReport, order=ImageOrder),
    "start": _method(StartReport, order=StartOrder),
    "capture": _method(CaptureReport, order=CaptureOrder),
    "stop": _method(None, replica=str, grace_s=float),
    "dial": _method(None, replica=str),
    "replicas": _method(tuple[ReplicaStatus, ...]),
    "usage": _method(tuple[ReplicaUsage, ...]),
    "disk": _method(DiskReport),
    "exits": _method(ReplicaStatus),
    "logs": _method(Base64Bytes, replica=str, tail_bytes=int),
    "snapshots": _method(tuple[SnapshotStatus, ...]),
    "forget_app": _method(None, tenant=str, app=str),
}

# Not repeated when a connection has ended without a reply: it may have been carried out.
ONCE = frozenset({"start", "capture", "bring_image"})

# What changes nothing and may be asked by whoever reaches the agent, under an epoch or without.
LOOKS = frozenset({"facts", "replicas", "usage", "disk", "exits", "logs", "snapshots"})

_EPOCH: TypeAdapter[ControlEpoch | None] = TypeAdapter(ControlEpoch | None)

_ERRORS: dict[str, type[NagaraError]] = {
    kind.__name__: kind
    for kind in (
        contract.NodeError,
        contract.BadImageError,
        contract.StartFailedError,
        contract.ReplicaGoneError,
        contract.NodeUnavailableError,
        contract.DeposedError,
    )
}


def encode_request(
    method: str, arguments: Mapping[str, Any], epoch: ControlEpoch | None = None
) -> bytes:
    """The line that asks for a method."""
    known = METHODS[method].arguments
    plain = {name: known[name].dump_python(value, mode="json") for name, value in arguments.items()}
    request = {"method": method, "arguments": plain}
    if epoch is not None:
        request["epoch"] = _EPOCH.dump_python(epoch, mode="json")
    return json.dumps(request).encode() + b"\n"


def decode_request(line: bytes) -> tuple[str, dict[str, Any], ControlEpoch | None]:
    """Method, arguments, epoch. Raises ValueError for anything that is not a request."""
    try:
        request = json.loads(line)
        method, given = request["method"], request["arguments"]
        known = METHODS[method].arguments
        arguments = {name: known[name].validate_python(value) for name, value in given.items()}
        return method, arguments, _EPOCH.validate_python(request.get("epoch"))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a request: {error!r}") from error


def encode_result(method: str, value: Any) -> bytes:
    """The line that answers a method."""
    plain = METHODS[method].result.dump_python(value, mode="json")
    return json.dumps({"result": plain}).encode() + b"\n"


def encode_error(error: Exception) -> bytes:
    """The line that says a call has failed. What is no `NodeError` becomes one."""
    kind = type(error).__name__ if type(error).__name__ in _ERRORS else "NodeError"
    if isinstance(error, ConnectionError):  # of `dial`: nobody listens on the replica's port
        kind = "ConnectionError"
    if isinstance(error, NagaraError):
        plain = {"kind": kind, "what": error.what, "where": error.where, "hint": error.hint}
    else:
        plain = {"kind": kind, "what": str(error) or type(error).__name__}
    return json.dumps({"error": plain}).encode() + b"\n"


def decode_reply(method: str, line: bytes) -> Any:
    """The result. Raises the error that the call has failed with."""
    reply = json.loads(line)
    if (error := reply.get("error")) is None:
        return METHODS[method].result.validate_python(reply["result"])
    if error["kind"] == "ConnectionError":
        raise ConnectionError(error["what"])
    kind = _ERRORS.get(error["kind"], contract.NodeError)
    raise kind(error["what"], where=error.get("where"), hint=error.get("hint"))
