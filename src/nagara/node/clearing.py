"""Clears away what no node answers for, by the means a node itself has.

Called from the command line, on a loop of its own, while no node runs on the state folder.
"""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.folder_lock import folder_lock
from nagara.image.models import adding
from nagara.image.mounts import mount_points, unmount_if_mounted
from nagara.node.build import build_node
from nagara.node.leaks import has_node, holdings
from nagara.node.leftovers import Owned
from nagara.sandbox.cgroups import end_cgroup
from nagara.sandbox.criu_folder import remove_unused_trees
from nagara.sandbox.leftovers import kill_tools_in


async def clear(state: Path, *, keep_replicas: bool) -> None:
    """Clears everything orphaned of the node with this state folder.

    Args:
        keep_replicas: whether ready replicas that a keeper holds stay.

    Raises:
        NagaraError: a node runs there, or something resists.
    """
    if has_node(state):
        raise NagaraError(
            "a node agent works here and clears its own",
            where=str(state),
            hint="end `nagara up` (or `nagara agent`) first; the next one clears as it begins",
        )
    node = build_node(state)
    await node.open()  # takes ready replicas over and clears all others away
    await node.close(stop_replicas=not keep_replicas)
    await asyncio.to_thread(_clear_files, state)
    orphaned = [each.owned for each in await holdings(state) if each.answered_by is None]
    await asyncio.to_thread(_clear_orphaned, state, orphaned)


def _clear_orphaned(state: Path, things: Sequence[Owned]) -> None:
    """What lives goes first: it may hold any of the rest."""
    if any(thing.kind == "tool" for thing in things):
        for place in (state / "node", state / "snapshots/.staging"):
            kill_tools_in(place)
    for thing in things:
        if thing.kind == "control group":
            end_cgroup(Path(thing.name).name)
    for thing in things:
        if thing.kind == "mount":  # listed deepest first
            unmount_if_mounted(Path(thing.name))
    for thing in things:
        if thing.kind == "socket":
            Path(thing.name).unlink(missing_ok=True)
        elif thing.kind == "trial folder":
            remove_folder(Path(thing.name))


def _clear_files(state: Path) -> None:
    models, tools = state / "models", state / "tools"
    if models.is_dir() and not models.is_symlink():
        with adding(models):  # begins by removing what others have left
            pass
    if tools.is_dir() and not tools.is_symlink():
        with folder_lock(tools):
            remove_unused_trees(tools)


def remove_folder(folder: Path) -> None:
    """Deletes an orphaned folder, but never through something that is mounted in it."""
    if left := mount_points(folder.resolve()):
        raise NagaraError("is still mounted; nothing was deleted", where=str(left[0].target))
    shutil.rmtree(folder)
