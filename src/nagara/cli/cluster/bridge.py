"""The process in which Ray is spoken: `python -m nagara.cli.cluster.bridge FD`.

A Ray driver has threads of its own and ends its process when the head is gone for long. So it is
a child of the control process, which asks it over the socket FD and starts another when it ends.
The only module that imports Ray.

A request is a line of JSON, `{"call", "arguments"}`; the first is `connect`. Its reply is
`{"result"}` or `{"error": {"kind", "what"}}`. One after the other, each with a limit.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated import autoscaler_pb2
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.internal_kv import _internal_kv_get, internal_kv_get_gcs_client
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nagara.base.linux import die_with_parent
from nagara.cli.cluster.actor import MachineActor
from nagara.cli.cluster.address import AUTO, CLIENT

NAMESPACE = "nagara"
STATUS_S, ORDER_S, HOLD_S = 4.0, 20.0, 10.0
KNOCK_S = 5.0

_TYPES = "accelerator_type:"  # Ray's own resources: accelerator_type:H100

NOTHING_COMES = (
    "Ray's autoscaler adds no such machine: none of its node types has as much, "
    "its max_workers are there, or the cluster has no autoscaler"
)


class RefusedError(Exception):
    """Certainly nothing was done: somebody else has what was asked for."""


class Bridge:
    """One connection to a cluster.

    An actor is only where a machine is lent, and elsewhere once, to be told what is there: Ray's
    autoscaler never takes a machine for idle while an actor is on it.
    """

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}  # by node
        self._seen: dict[str, dict[str, Any]] = {}  # what each last said
        self._free: set[str] = set()  # nodes that said so last, and have no actor since
        self._is_left_out = ""
        self._state: str | None = None

    def connect(self, address: str, leaves_own_out: bool, state: str | None) -> dict[str, Any]:
        """Joins the cluster.

        Args:
            leaves_own_out: this process's own machine is used without Ray.
            state: the state folder on every machine; None: as `nagara` finds it there.
        """
        _knock(address)
        try:
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )  # fmt: skip
        except ConnectionError as error:
            if address == AUTO:
                raise ConnectionError("no Ray runs on this machine") from error
            raise
        self._state = state
        if leaves_own_out:
            self._is_left_out = ray.get_runtime_context().get_node_id()
        return {"ray": ray.__version__}

    def machines(self) -> list[dict[str, Any]]:
        """All that are alive, with what their actors say of them."""
        nodes = {one["NodeID"]: one for one in ray.nodes() if one["Alive"]}
        nodes.pop(self._is_left_out, None)
        self._forget_all_but(nodes)
        has_actor = set(list_named_actors())  # another control process may have lent it
        quiet = {one for one in self._free if _actor_name(one) not in has_actor}
        said = {name: self._seen[name] for name in quiet}
        asked = {
            self._actor(node).status.remote(): name
            for name, node in nodes.items() if name not in quiet
        }  # fmt: skip
        for answer in _ready(list(asked)):
            name = asked[answer]
            try:
                said[name] = self._seen[name] = ray.get(answer, timeout=1.0)
            except RayError:  # another one is made with the next question
                self._actors.pop(name, None)
                continue
            if not said[name]["lent_as"]:
                self._leave(name)
        return [
            _described(node, said.get(name), self._seen.get(name)) for name, node in nodes.items()
        ]

    def lend(
        self, machine: str, name: str, token: str, port: int, certificates: str | None
    ) -> None:
        """Keeps all of the machine for the pool, and has an agent run there."""
        node = next((one for one in ray.nodes() if one["NodeID"] == machine), None)
        if node is None or not node["Alive"]:
            raise RefusedError("the machine is gone")
        _hold(node)
        self._free.discard(machine)
        order = self._actor(node).lend.remote(name, token, port, certificates)
        if not ray.get(order, timeout=ORDER_S):
            raise RefusedError("the machine is lent under another name")

    def take_back(self, machine: str) -> None:
        """Ends the agent and lets go of the machine."""
        node = next((one for one in ray.nodes() if one["NodeID"] == machine), None)
        if node is not None and node["Alive"]:
            ray.get(self._actor(node).take_back.remote(), timeout=ORDER_S)
            self._seen[machine] = ray.get(self._actor(node).status.remote(), timeout=ORDER_S)
            self._leave(machine)
        if (held := _held(machine)) is not None:
            remove_placement_group(held)

    def ask_for(self, bundles: list[dict[str, float]]) -> str:
        """Tells the autoscaler what is waited for in all.

        It is told how large the cluster shall be, machines in use included: so these are in it.
        Returns why nothing of it is on its way; empty where something is.
        """
        alive = [one["Resources"] for one in ray.nodes() if one["Alive"]] if bundles else []
        shapes = [*map(_asked_again, alive), *bundles]  # earlier versions take whole numbers only
        wanted = [{key: int(one) for key, one in shape.items()} for shape in shapes if shape]
        if ray.util.client.ray.is_connected():  # asking from here would end this process
            asked = ray.remote(num_cpus=0)(_ask_autoscaler).remote(wanted)
            obstacle = str(ray.get(asked, timeout=ORDER_S))
        else:
            obstacle = _ask_autoscaler(wanted)
        return obstacle if bundles else ""

    def _leave(self, machine: str) -> None:
        """Ends the actor of a machine that is not lent."""
        if (actor := self._actors.pop(machine, None)) is not None:
            ray.kill(actor)
        self._free.add(machine)

    def _forget_all_but(self, nodes: dict[str, Any]) -> None:
        self._free &= nodes.keys()
        for known in (self._actors, self._seen):
            for gone in known.keys() - nodes.keys():
                del known[gone]

    def _actor(self, node: dict[str, Any]) -> Any:
        name = node["NodeID"]
        if name not in self._actors:
            self._actors[name] = (
                ray.remote(MachineActor)
                .options(
                    name=_actor_name(name), namespace=NAMESPACE, lifetime="detached",
                    get_if_exists=True, num_cpus=0, max_restarts=-1, max_concurrency=4,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
                )
                .remote(node["NodeManagerAddress"], self._state)
            )  # fmt: skip
        return self._actors[name]


def _knock(address: str) -> None:
    """Raises `ConnectionError` where nobody listens: Ray itself would try for a minute."""
    if address == AUTO:
        return  # Ray looks for it
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    except OSError as error:
        why = "it is not known" if isinstance(error, socket.gaierror) else error.strerror or error
        raise ConnectionError(f"nobody answers at {host}:{port}: {why}") from error


def _actor_name(node: str) -> str:
    return f"machine-{node}"


def _ready(asked: list[Any]) -> list[Any]:
    """Those that are answered in time."""
    return list(ray.wait(asked, num_returns=len(asked), timeout=STATUS_S)[0]) if asked else []


def _described(
    node: dict[str, Any], said: dict[str, Any] | None, seen: dict[str, Any] | None
) -> dict[str, Any]:
    """As `EngineMachine`. Whose actor does not answer just now is told as last seen."""
    resources, labels = node["Resources"], node.get("Labels") or {}
    known = said or seen or {}
    types = [name[len(_TYPES) :].lower() for name in _types(resources)]
    devices = int(resources.get("GPU", 0))
    problem = known.get("problem", "")
    return {
        "id": node["NodeID"],
        "type": (types or ["gpu"])[0] if devices else "cpu",
        "devices": devices,
        "cpu": float(resources.get("CPU", 0)),
        "memory_bytes": int(known.get("memory_bytes") or resources.get("memory", 0)),
        "disk_bytes": int(known.get("disk_bytes", 0)),
        "region": labels.get("ray.io/region") or labels.get("region") or "",
        "lent_as": known.get("lent_as", ""),
        "address": known.get("address", ""),
        "problem": problem if said is not None else "Ray's actor there does not answer",
    }


def _types(resources: dict[str, float]) -> list[str]:
    return [name for name in resources if name.startswith(_TYPES)]


def _whole(resources: dict[str, float]) -> dict[str, float]:
    """All of a machine that jobs share, as a bundle."""
    return {key: resources[key] for key in ("CPU", "GPU") if resources.get(key)}


def _asked_again(resources: dict[str, float]) -> dict[str, float]:
    """A machine that is there, as `RayEngine` asks for another one like it."""
    whole = _whole(resources)
    return whole | dict.fromkeys(_types(resources)[:1], 1.0) if "GPU" in whole else whole


def _ask_autoscaler(bundles: list[dict[str, int]]) -> str:
    """As `Bridge.ask_for`. Needs nothing of nagara, for it may run elsewhere in the cluster."""
    request_resources(bundles=bundles)
    if not is_autoscaler_v2():
        status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
        report = status.get("autoscaler_report", {})
        is_coming = bool(report.get("pending_nodes") or report.get("pending_launches"))
        return "" if is_coming else NOTHING_COMES
    reply = autoscaler_pb2.GetClusterStatusReply()
    reply.ParseFromString(internal_kv_get_gcs_client().get_cluster_status())
    state = reply.autoscaling_state
    if state.infeasible_cluster_resource_constraints:
        return NOTHING_COMES
    if state.pending_instance_requests or state.pending_instances:
        return ""
    failed = [one.reason for one in state.failed_instance_requests if one.reason]
    return f"Ray's autoscaler could not add it: {failed[-1]}" if failed else NOTHING_COMES


def _hold(node: dict[str, Any]) -> None:
    """Other jobs get nothing of the machine, and an autoscaler does not take it for idle."""
    name = node["NodeID"]
    if (held := _held(name)) is not None:
        if placement_group_table(held)["state"] == "CREATED":
            return
        remove_placement_group(held)
    whole = _whole(node["Resources"])
    if not whole:
        return
    held = placement_group(
        [whole], strategy="STRICT_PACK", name=f"machine-{name}", lifetime="detached",
        _soft_target_node_id=name,
    )  # fmt: skip
    if not held.wait(HOLD_S) or placement_group_table(held)["bundles_to_node_id"][0] != name:
        remove_placement_group(held)
        raise RefusedError("another of Ray's jobs uses the machine")


def _held(machine: str) -> PlacementGroup | None:
    try:
        return get_placement_group(f"machine-{machine}")
    except ValueError:
        return None


def _answer(bridge: Bridge, line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return {"result": getattr(bridge, request["call"])(**request["arguments"])}
    except RefusedError as error:
        return _error("refused", str(error))
    except GetTimeoutError:
        return _error("unclear", "Ray's actor there does not answer")
    except RayError as error:
        return _error("unclear", str(error).strip().splitlines()[0])
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        return _error("unclear", _in_a_line(f"{error}") or type(error).__name__)


def _in_a_line(said: str) -> str:
    """What Ray has said over many lines; of a trace of another process, how it ends."""
    lines = said.strip().splitlines()
    return " ".join((lines[-1] if any("Traceback" in one for one in lines) else said).split())


def _error(kind: str, what: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "what": what}}


def main() -> int:
    """Answers until the socket is closed."""
    die_with_parent(signal.SIGKILL)  # nothing here needs an orderly end
    bridge = Bridge()
    with socket.socket(fileno=int(sys.argv[1])) as asked, asked.makefile("rw") as lines:
        for line in lines:
            lines.write(json.dumps(_answer(bridge, line)) + "\n")
            lines.flush()
    os._exit(0)  # a driver that is disconnecting from a dead head would take its time


if __name__ == "__main__":
    sys.exit(main())
