"""Everything a node owns on this machine, and what of it nobody answers for.

Evidence is read from the machine (mounts, control groups, folders, locks, sockets), never from
what a process remembers. Called from the command line, on a loop of its own; changes nothing.

    a node runs          it answers for the replicas it names, for its layers and captures
    only a keeper runs   ready replicas are kept for the next node; all else is orphaned
    nothing runs         everything is orphaned
"""

import re
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.models import unfinished_models
from nagara.image.mounts import mount_points
from nagara.node.leftovers import Owned, owned_by
from nagara.node.remote_node import RemoteNode
from nagara.node.replica_folder import ReplicaFolder
from nagara.sandbox.cgroups import groups_beginning
from nagara.sandbox.criu_folder import unused_trees
from nagara.sandbox.keeper_client import KeeperClient, KeeperError
from nagara.sandbox.lock_holders import is_locked
from nagara.sandbox.scratch import LOCK, PREFIX
from nagara.sandbox.unix_socket import connect
from nagara.snapshot.self_test import CONTROL_GROUP
from nagara.store.ledger import read_pins

_ASK_S = 2.0


@dataclass(frozen=True, slots=True)
class Holding:
    """One owned thing and who answers for it; None: nobody, it is orphaned."""

    owned: Owned
    answered_by: str | None


@dataclass(frozen=True, slots=True)
class _Household:
    """Who runs on a state folder, and which replicas they speak for.

    `named` is None when a node runs that cannot be asked: it answers for everything.
    """

    has_node: bool
    named: frozenset[str] | None
    has_keeper: bool
    kept: frozenset[str]
    has_mounted_images: bool  # a person has, with `nagara image mount`

    def answers_for(self, replica: str) -> str | None:
        if self.has_node:
            return "the node agent" if self.named is None or replica in self.named else None
        return "the keeper, until the next `nagara up`" if replica in self.kept else None


async def holdings(state: Path) -> list[Holding]:
    """Everything of the node with this state folder that exists on the machine now."""
    household = await _household(state)
    found = [Holding(thing, _who(thing, state, household)) for thing in owned_by(state)]
    node = "the node agent" if household.has_node else None
    is_needed = household.has_node or household.kept or household.has_mounted_images
    keeper = "itself" if is_needed else None
    if household.has_keeper:
        found.append(Holding(Owned("process", "keeper"), keeper))
    found += [
        Holding(Owned("process", replica), household.answers_for(replica))
        for replica in sorted(household.kept)
    ]
    for path, owner in ((state / "agent.sock", node), (state / "node/keeper.sock", keeper)):
        if path.exists():
            is_alive = owner is not None and _accepts(path)
            found.append(Holding(Owned("socket", str(path)), owner if is_alive else None))
    return found + _unfinished(state) + _trials(state)


def has_node(state: Path) -> bool:
    """Whether a node works on the state folder."""
    return is_locked(state / "node/agent.lock") or is_locked(state / "node/replicas/.lock")


async def _household(state: Path) -> _Household:
    named: frozenset[str] | None = frozenset()
    if has_node(state):
        try:
            named = frozenset(
                [r.replica for r in await RemoteNode(state / "agent.sock").replicas()]
            )
        except (NagaraError, OSError):  # it listens elsewhere, or is just coming up or ending
            named = None
    kept: frozenset[str] = frozenset()
    has_keeper = is_locked(state / "node/keeper.lock")
    if has_keeper:
        try:
            children = await KeeperClient(state / "node/keeper.sock").children()
        except KeeperError:
            children = ()
        alive = (child.name for child in children if child.exit_code is None)
        kept = frozenset(name for name in alive if has_node(state) or _is_ready(state, name))
    return _Household(has_node(state), named, has_keeper, kept, _has_mounted_images(state))


def _has_mounted_images(state: Path) -> bool:
    holders = {Path(pin.holder) for pin in read_pins(state / "store/ledger.sqlite")}
    return any(point.target in holders for point in mount_points())


def _is_ready(state: Path, replica: str) -> bool:
    record = ReplicaFolder(state / "node/replicas" / replica).read()
    return record is not None and record.ready and not record.is_capture


def _who(thing: Owned, state: Path, household: _Household) -> str | None:
    replica = _replica_of(thing, state)
    if replica is not None:
        return household.answers_for(replica)
    if household.has_node:
        return "the node agent"
    if thing.kind == "network rules":
        return "the keeper, until the next `nagara up`" if household.kept else None
    files = str(state.resolve() / "files")
    if thing.kind == "file daemon" or thing.name.startswith(files):
        if household.kept:
            return "the keeper, until the next `nagara up`"
        return "`nagara image mount`" if household.has_mounted_images else None
    return None


def _replica_of(thing: Owned, state: Path) -> str | None:
    """The replica that a thing belongs to; None for layers, captures and tools."""
    if thing.kind in ("replica folder", "runtime record"):
        return thing.name
    if thing.kind == "control group":
        return Path(thing.name).name.partition("-")[2]
    inside = re.escape(str(state.resolve() / "node"))
    found = re.match(rf"{inside}/(?:replicas|runc)/([^/]+)", thing.name)
    return found[1] if found else None


def _accepts(path: Path) -> bool:
    try:
        connect(path, timeout_s=_ASK_S).close()
    except OSError:
        return False
    return True


def _unfinished(state: Path) -> list[Holding]:
    """Models and tools in the making. Links lead to another state folder's: not this one's."""
    found = []
    for folder, of in (("models", unfinished_models), ("tools", unused_trees)):
        place = state / folder
        if place.is_dir() and not place.is_symlink():
            maker = f"whoever adds to {folder}" if is_locked(place / ".lock") else None
            kind = f"unfinished part of {folder}"
            found += [Holding(Owned(kind, str(path)), maker) for path in of(place)]
    return found


def _trials(state: Path) -> list[Holding]:
    """What `nagara doctor` and `nagara setup` make to try things out."""
    found = []
    for folder in sorted(state.glob(f"{PREFIX}*")):
        tester = "the process that tries things out" if is_locked(folder / LOCK) else None
        found.append(Holding(Owned("trial folder", str(folder)), tester))
    for group in groups_beginning(CONTROL_GROUP):
        tester = group.name.removeprefix(CONTROL_GROUP).partition("-")[0]
        is_running = Path("/proc", tester).exists()
        owner = f"the process {tester}" if is_running else None
        found.append(Holding(Owned("control group", str(group)), owner))
    return found
