"""Puts a node together out of what this machine has. Blocking: before the event loop runs."""

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import nagara
from nagara.image.host import HostImage
from nagara.image.mounting import ImageMounts, Method
from nagara.node.container_runtime import ContainerRuntime
from nagara.node.frozen_layers import FrozenLayers
from nagara.node.image_mounts import open_image_mounts
from nagara.node.local_node import LocalNode
from nagara.node.logs import ReplicaLogs
from nagara.node.process_runtime import ProcessRuntime
from nagara.node.replica_images import NodeImages
from nagara.node.replica_network import ReplicaNetworks
from nagara.node.replica_trees import ReplicaTrees
from nagara.node.sealing import SETTINGS_NAME, Sealing
from nagara.node.snapshot_images import SnapshotImages
from nagara.node.snapshots import NodeSnapshots
from nagara.node.zone import NO_MEMBER, Member, NodeZone
from nagara.sandbox.keeper_client import KeeperClient
from nagara.sandbox.runc import Runc
from nagara.sandbox.tools import Tools, find_tools
from nagara.snapshot.catalog import Catalog
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.device.replica import find_device
from nagara.snapshot.facts import read_host_facts
from nagara.snapshot.levelling import can_level

_WITHOUT_EROFS = "mkfs.erofs (package erofs-utils): no snapshots; `nagara setup erofs` gets it"


def build_node(state: Path, resolvers: Sequence[str] = (), member: Member = NO_MEMBER) -> LocalNode:
    """The node of this machine with its state below `state`, a member of its zone.

    As root with runc: containers, and snapshots where CRIU and mkfs.erofs are there too.
    Otherwise plain processes. `LocalNode.facts` says what is missing.

    Args:
        resolvers: name servers for replicas with a way out; empty takes the machine's.
    """
    folder = state / "node"
    keeper = keeper_of(state)
    logs = ReplicaLogs(folder / "logs")
    models = state / "models"
    if os.geteuid() != 0:
        missing = ("root: replicas run as plain processes, without isolation and snapshots",)
        return _process_node(folder, models, keeper, logs, missing, member)
    tools = find_tools(state / "tools")
    if tools.runc is None:
        return _process_node(folder, models, keeper, logs, tools.missing, member)
    networks = ReplicaNetworks(state, resolvers)
    return _container_node(folder, state, keeper, logs, tools, networks, member)


def keeper_of(state: Path) -> KeeperClient:
    """The keeper of the node below `state`."""
    return KeeperClient(state / "node" / "keeper.sock")


def _process_node(
    folder: Path,
    models: Path,
    keeper: KeeperClient,
    logs: ReplicaLogs,
    missing: tuple[str, ...],
    member: Member = NO_MEMBER,
) -> LocalNode:
    images = node_images(folder.parent, "checkout")
    return LocalNode(
        root=folder / "replicas",
        runtime=ProcessRuntime(models=models, keeper=keeper, images=images),
        keeper=keeper,
        logs=logs,
        snapshots=None,
        images=images,
        zone=NodeZone(folder.parent / "store", images, None, member),
        missing=missing,
    )


def _container_node(
    folder: Path,
    state: Path,
    keeper: KeeperClient,
    logs: ReplicaLogs,
    tools: Tools,
    networks: ReplicaNetworks,
    member: Member,
) -> LocalNode:
    assert tools.runc is not None
    image = HostImage(state=state, needed=_own_environment())
    images = node_images(state)
    trees = ReplicaTrees(image, images, models=state / "models", programs=Path(sys.prefix) / "bin")
    kept = SnapshotImages(images, Sealing(state / "snapshots" / SETTINGS_NAME))
    layers = FrozenLayers(folder / "layers", kept.layer)
    device = find_device()
    versions = (f"runc {tools.runc_version}", f"criu {tools.criu_version}", platform.machine())
    facts = read_host_facts(versions, device)
    runtime = ContainerRuntime(
        state=folder,
        trees=trees,
        runc=Runc(tools.runc, tools.criu, folder / "runc"),
        keeper=keeper,
        layers=layers,
        snapshots=kept,
        can_level=can_level(facts),
        devices=DeviceOrders(device),
        networks=networks,
    )
    missing = _missing(tools)
    snapshots = catalog = None
    if tools.criu is not None and not missing:
        catalog = Catalog(state / "snapshots", kept.shelf, kept.tenants)
    zone = NodeZone(state / "store", images, catalog, member)
    if catalog is not None:
        snapshots = NodeSnapshots(
            catalog=catalog, facts=facts, runtime=runtime,
            layers=layers, images=kept, published=zone.publish,
        )  # fmt: skip
    return LocalNode(
        root=folder / "replicas",
        runtime=runtime,
        keeper=keeper,
        logs=logs,
        snapshots=snapshots,
        images=images,
        zone=zone,
        missing=missing,
    )


def _missing(tools: Tools) -> tuple[str, ...]:
    return (*tools.missing, *(() if shutil.which("mkfs.erofs") else (_WITHOUT_EROFS,)))


def node_images(state: Path, method: Method | None = None) -> NodeImages:
    """The images of the node with its state below `state`; nothing is opened yet.

    Args:
        method: how to show them; None tries out what this machine can do.
    """

    def open_mounts() -> ImageMounts:
        return open_image_mounts(state, supervise=True, method=method)

    return NodeImages(state, open_mounts)


def _own_environment() -> tuple[Path, ...]:
    """What a replica needs to run programs of the environment that nagara is installed in.

    Besides the environment itself: folders its path files name, such as an editable source tree.
    """
    imported_from = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    package = Path(nagara.__file__).parent
    return (Path(sys.prefix), Path(sys.base_prefix), package, *imported_from)
