"""Saving a replica: memory and the frozen upper layer. Blocking: worker threads only.

Order: the container is frozen before anything is read and stays frozen until it is ended, so
that memory, layer and marks belong to the same moment.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.frozen import freeze, manifest
from nagara.sandbox.fault_points import reach
from nagara.sandbox.rights import CAP_SYS_RESOURCE, has_capability, other_users
from nagara.sandbox.runc import Runc
from nagara.snapshot.catalog import LAYER, MEMORY, FileMark
from nagara.snapshot.criu_images import ImageFormatError
from nagara.snapshot.errors import CaptureError
from nagara.snapshot.opened import OpenedFiles
from nagara.snapshot.preflight import findings
from nagara.snapshot.processes import host_files, processes_of
from nagara.snapshot.replica_facts import read_replica_facts
from nagara.snapshot.zero_pages import drop_zero_pages

# What the checkpoint tool is told at capture and restore alike. No request touches a replica
# that is being captured or restored, so the network need not be locked (a locked port drops the
# first SYN and costs its sender a second); a connection that is still open is not carried.
# Locks are those of the replica's own layer and carried too. An open file that has lost one of
# several names gets a new one for the dump, which is taken away again afterwards. In a tmpfs
# (semaphores of several processes) that is carried with the dump; in the layer, which is frozen
# later, it is not, and the preflight refuses it.
GHOST_LIMIT_BYTES = 256 << 20
CRIU_CONFIG = (
    f"network-lock skip\ntcp-close\nghost-limit {GHOST_LIMIT_BYTES}\nfile-locks\nlink-remap\n"
)
_SHOWN = 5  # findings in one message

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a capture has written to its staging folder.

    `notes`: what it has left out. `is_levelled`: it needs no more than the level of `levelling`.
    `sealed_by`: names the key that its files are encrypted with.
    """

    host_files: tuple[FileMark, ...]
    layer_digest: str
    memory_bytes: int
    layer_bytes: int
    notes: tuple[str, ...] = ()
    is_levelled: bool = False
    sealed_by: str | None = None


def save(
    runc: Runc,
    container: str,
    init_pid: int,
    *,
    upper: Path,
    binds: Mapping[Path, Path],
    opened: OpenedFiles | None,
    staging: Path,
    work: Path,
) -> Saved:
    """Freezes the container and writes its memory and layer to `staging`.

    Args:
        binds: folders shown to the replica: path inside → path on the machine.
        opened: has noted what the replica opened since its start; None where nothing it sees is
            the machine's own.
        work: folder for the checkpoint tool's log.

    Raises:
        CaptureError: with the tool's reason. The container may be left frozen.
    """
    if why := _unsavable(init_pid):
        raise CaptureError(why, where=container, hint="`nagara doctor` says how to get it")
    notes = _checked(init_pid, container)
    try:
        runc.pause(container)
        reach("capture.paused")
        marks: tuple[FileMark, ...] = ()
        if opened is not None:
            opened.close()
            marks = host_files(init_pid, binds, opened.paths())
        reach("capture.listed")
        runc.checkpoint(container, staging / MEMORY, work)
        reach("capture.memory")
        _shorten(staging / MEMORY, container)
        memory_bytes = sum(path.stat().st_size for path in (staging / MEMORY).iterdir())
        layer_bytes = freeze(upper, staging / LAYER)
        layer_digest = listing_digest(upper)
        reach("capture.layer")
    except NagaraError as error:
        raise CaptureError(error.what, where=container, hint=error.hint) from error
    except OSError as error:
        raise CaptureError(error.strerror or str(error), where=container) from error
    return Saved(marks, layer_digest, memory_bytes, layer_bytes, notes)


def _checked(init_pid: int, container: str) -> tuple[str, ...]:
    """What is lost though the replica can be saved. Raises `CaptureError` when it cannot."""
    try:
        facts = read_replica_facts(init_pid)
    except OSError as error:
        raise CaptureError("ended before it could be saved", where=container) from error
    found = findings(facts, ghost_limit_bytes=GHOST_LIMIT_BYTES)
    if fatal := [finding for finding in found if finding.prevents]:
        hints = dict.fromkeys(finding.hint for finding in fatal)
        what = "cannot be saved: " + "; ".join(map(str, fatal[:_SHOWN]))
        raise CaptureError(what, where=container, hint="; ".join(list(hints)[:_SHOWN]))
    return tuple(map(str, found))


def _shorten(memory: Path, container: str) -> None:
    """Leaves zero pages out; a snapshot that cannot be shortened is good as it is."""
    try:
        saved_bytes = drop_zero_pages(memory)
    except ImageFormatError as error:
        _log.warning("%s: the snapshot keeps its zero pages: %s", container, error)
    else:
        _log.info("%s: %d bytes of zero pages are not carried", container, saved_bytes)


def _unsavable(init_pid: int) -> str | None:
    """Why the tool will fail, where that can be seen beforehand and told better than it does."""
    users = other_users(processes_of(init_pid))
    if users and not has_capability(CAP_SYS_RESOURCE):
        named = ", ".join(map(str, sorted(users)))
        return (
            f"processes of it run as user {named}, and saving another user's processes needs "
            "CAP_SYS_RESOURCE, which nagara does not have here"
        )
    return None


def listing_digest(tree: Path) -> str:
    """Names, kinds and sizes of everything in a layer, as one digest."""
    return hashlib.sha256(json.dumps(manifest(tree), sort_keys=True).encode()).hexdigest()
