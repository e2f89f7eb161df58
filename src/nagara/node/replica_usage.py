"""What replicas use, and the end of those that write more to their own layer than they may.

A layer is bounded by looking at it: a project quota would need a file system made for it, which
few have. So a replica can be over its limit for some seconds before it is ended, with the reason.
Called on the node's loop; reading blocks and is done in worker threads.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from nagara.base.units import format_bytes
from nagara.contract.replica import ReplicaUsage
from nagara.node.owned_tasks import in_thread
from nagara.node.replica import Replica
from nagara.sandbox.cgroups import read_usage
from nagara.sandbox.keeper_client import KeeperError

LOOK_EVERY_S = 2.0
_BLOCK_BYTES = 512
_DEVICES_S = 5.0
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu", "--format=csv,noheader,nounits")

_log = logging.getLogger(__name__)


class Ender(Protocol):
    """What ends a replica's first process."""

    async def signal(self, name: str, number: int) -> None: ...


async def end_what_outgrows(
    replicas: Mapping[str, Replica], keeper: Ender, look_every_s: float = LOOK_EVERY_S
) -> None:
    """For ever: ends replicas whose own layer is larger than their limit."""
    while True:
        await asyncio.sleep(look_every_s)
        for replica in list(replicas.values()):
            limit_bytes = replica.record.disk_limit_bytes
            if limit_bytes is None or replica.running is None or replica.is_ending:
                continue
            replica.disk_bytes = await in_thread(layer_bytes, replica.folder.upper)
            if replica.disk_bytes > limit_bytes and not replica.is_ending:
                replica.why_ended = (
                    f"it wrote {format_bytes(replica.disk_bytes)} to its own layer, and "
                    f"limits.disk is {format_bytes(limit_bytes)}"
                )
                _log.warning("%s is ended: %s", replica.name, replica.why_ended)
                with contextlib.suppress(KeeperError):  # the next look tries again
                    await keeper.signal(replica.name, signal.SIGKILL)


def usage_of(replicas: Iterable[Replica]) -> tuple[ReplicaUsage, ...]:
    """Of ready ones of which it can be read. Blocking: milliseconds, more where devices are."""
    found = []
    replicas = [one for one in replicas if one.record.ready and not one.is_ending]
    busy = device_use() if any(replica.record.devices for replica in replicas) else {}
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    for replica in replicas:
        with contextlib.suppress(OSError, ValueError, KeyError):  # it ends, or has no group
            used = read_usage(replica.folder.control_group)
            shares = [busy[name] for name in replica.record.devices if name in busy]
            found.append(
                ReplicaUsage(
                    replica.name,
                    time.monotonic(),
                    used.cpu_s,
                    used.cores or cores,
                    used.memory_bytes,
                    used.memory_limit_bytes or machine_bytes,
                    replica.disk_bytes,
                    replica.record.disk_limit_bytes,
                    max(shares, default=None),
                )
            )
    return tuple(found)


def layer_bytes(folder: Path) -> int:
    """What a folder's files take of the disk, each once. What goes meanwhile is left out."""
    total, seen, waiting = 0, set(), [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if state.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                        if state.st_ino in seen:
                            continue
                        seen.add(state.st_ino)
                    total += state.st_blocks * _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
    return total


def device_use() -> dict[str, float]:
    """How busy each NVIDIA device is, from 0 to 1, by its CDI names; empty where none can be asked.

    A process of its own: a driver that hangs takes nothing along.
    """
    try:
        said = subprocess.run(
            _QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_DEVICES_S, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError):  # "[N/A]"
            index, uuid, percent = (word.strip() for word in line.split(","))
            share = float(percent) / 100
            found[f"nvidia.com/gpu={index}"] = found[f"nvidia.com/gpu={uuid}"] = share
    return found
