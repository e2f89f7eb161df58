"""What a node says of itself."""

import os
import socket

from nagara.contract.replica import NodeFacts
from nagara.node.replica_images import NodeImages
from nagara.node.runtime import Runtime
from nagara.node.snapshots import NodeSnapshots
from nagara.node.zone import NodeZone


def node_facts(
    runtime: Runtime,
    snapshots: NodeSnapshots | None,
    missing: tuple[str, ...],
    images: NodeImages,
    zone: NodeZone,
) -> NodeFacts:
    """The machine as it is now."""
    return NodeFacts(
        machine=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        isolation=runtime.isolation,
        can_snapshot=snapshots is not None,
        missing=missing,
        bringing=images.bringing(),
        cache=zone.cache,
        host_class="" if snapshots is None else snapshots.host_class,
    )
