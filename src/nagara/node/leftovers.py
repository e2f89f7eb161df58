"""Everything a node owns on this machine outside its own process, found by evidence.

What is listed while no node runs, apart from ready replicas that a next node takes over, is a
leak. Blocking: some ten milliseconds.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from nagara.image.mounts import mount_points
from nagara.node.image_mounts import FILE_DAEMON
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_network import network_name
from nagara.sandbox.cgroups import groups_beginning
from nagara.sandbox.egress import TABLE, tables
from nagara.sandbox.leftovers import tools_in


@dataclass(frozen=True, slots=True)
class Owned:
    """One thing outside the node's process: what it is, and its name, path or pid."""

    kind: str
    name: str


def owned_by(state: Path) -> list[Owned]:
    """What exists on the machine for the node with this state folder."""
    node, staging = state / "node", state / "snapshots" / ".staging"
    replicas = node / "replicas"
    prefix = ReplicaFolder(replicas / "any").control_group.removesuffix("any")
    found = [Owned("mount", str(point.target)) for point in mount_points(state.resolve())]
    found += [Owned("replica folder", name) for name in _inside(replicas)]
    found += [Owned("runtime record", name) for name in _inside(node / "runc")]
    found += [Owned("layer folder", name) for name in _inside(node / "layers")]
    found += [Owned("unfinished snapshot", name) for name in _inside(staging)]
    found += [Owned("tool", str(pid)) for place in (node, staging) for pid in tools_in(place)]
    found += [Owned("file daemon", str(pid)) for pid in file_daemons(state / "files")]
    found += [Owned("control group", str(path)) for path in groups_beginning(prefix)]
    own = TABLE + network_name(state)
    found += [Owned("network rules", name) for name in tables() if name == own]
    return found


def file_daemons(folder: Path) -> list[int]:
    """Daemons of image mounts below a folder, by the control socket they were told."""
    inside = os.fsencode(folder) + b"/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if FILE_DAEMON.encode() in words and any(w.startswith(inside) for w in words):
                    found.append(int(entry.name))
    return sorted(found)


def _inside(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir())
