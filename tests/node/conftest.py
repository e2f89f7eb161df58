"""Nodes on state folders of their own, and the proof that nothing of them is left."""

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from nagara.contract.replica import (
    Canary,
    CaptureOrder,
    CaptureReport,
    Lease,
    ReplicaSpec,
    StartOrder,
    StartReport,
)
from nagara.image.images import load_tree
from nagara.image.index import build_index
from nagara.image.index_reader import read_index
from nagara.image.mounts import unmount_tree
from nagara.image.shelf import Shelf
from nagara.image.tree import INLINE_LIMIT_BYTES, contents, walk
from nagara.node.build import _process_node, build_node
from nagara.node.leftovers import owned_by
from nagara.node.local_node import LocalNode
from nagara.node.logs import ReplicaLogs
from nagara.sandbox.cgroups import kill_cgroup, remove_cgroup, thaw_cgroup
from nagara.sandbox.keeper_client import KeeperClient
from nagara.sandbox.leftovers import kill_tools_in
from nagara.sandbox.tools import Tools
from nagara.snapshot.canary import Answer, ask
from nagara.store.roots import put_list

if TYPE_CHECKING:
    from nagara.contract.node import Node

NAGARA = (sys.executable, "-m", "nagara.cli.main")
APP = (Path(__file__).parent.parent / "apps/obedient.py").read_text()


class Yard:
    """One state folder with a node on it, and short ways to give it orders."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.prefix = f"t{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._node: LocalNode | None = None
        self.through: Node | None = None  # orders go through this one, if set

    @property
    def node(self) -> LocalNode:
        assert self._node is not None
        return self._node

    async def open(self) -> LocalNode:
        """A node, as one process of the agent would make it."""
        self._node = build_node(self.state)
        await self._node.open()
        return self._node

    async def open_process_node(self) -> LocalNode:
        """A node as an ordinary user's agent would make it, also where the tests run as root."""
        node = self.state / "node"
        node.mkdir(exist_ok=True)
        keeper = KeeperClient(node / "keeper.sock")
        logs = ReplicaLogs(node / "logs")
        self._node = _process_node(node, self.state / "models", keeper, logs, ("root: a test",))
        await self._node.open()
        return self._node

    async def close(self, *, stop_replicas: bool = True) -> None:
        if self._node:
            node, self._node = self._node, None
            await node.close(stop_replicas=stop_replicas)

    def name(self) -> str:
        return f"{self.prefix}-{next(self._numbers)}"

    def spec(self, **changes: Any) -> ReplicaSpec:
        """The obedient app; `env` adds to its settings."""
        env = {"LISTEN": "${PORT}", **changes.pop("env", {})}
        spec = ReplicaSpec(
            tenant="default",
            app="obedient",
            definition="d1",
            image="host",
            command=("python", "-S", "-c", APP) if "HOOKS" not in env else ("python", "-c", APP),
            port=8000,
            ready_path="/",
            canary=Canary("/canary"),
            env=tuple(env.items()),
            start_timeout_s=30.0,
        )
        return replace(spec, **changes)

    async def start(self, spec: ReplicaSpec | None = None, name: str | None = None) -> StartReport:
        order = StartOrder(name or self.name(), Lease("slot", 1), spec or self.spec())
        return await (self.through or self.node).start(order)

    async def capture(
        self, spec: ReplicaSpec | None = None, name: str | None = None
    ) -> CaptureReport:
        order = CaptureOrder(name or self.name(), Lease("slot", 1), spec or self.spec())
        return await (self.through or self.node).capture(order)

    async def stop(self, *replicas: str) -> None:
        await asyncio.gather(
            *((self.through or self.node).stop(replica, grace_s=0) for replica in replicas)
        )

    async def ask(self, replica: str, path: str = "/", body: str | None = None) -> Answer:
        dialled = await (self.through or self.node).dial(replica)
        dialled.setblocking(True)
        return await asyncio.to_thread(ask, dialled, path, body, timeout_s=20)

    async def tell(self, replica: str, code: str) -> Any:
        """Executes code in the replica's app; gives back what it leaves in `answer`."""
        answer = await self.ask(replica, "/", json.dumps(code))
        assert answer.status == 200, answer.body.decode()
        return json.loads(answer.body)

    def command(self, *words: str) -> list[dict[str, Any]]:
        """What `nagara snapshot` says, as another process than the node's."""
        command = [*NAGARA, "--state", str(self.state), "snapshot", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        return list(json.loads(done.stdout)["snapshots"])

    # -- what the store has of snapshots -----------------------------------------------------

    def roots(self, app: str, tenant: str = "default") -> list[Path]:
        """The roots of an app's snapshots."""
        return sorted((self.state / f"store/tenants/{tenant}/roots/snapshots").glob(f"{app}.*"))

    def notes(self, app: str) -> list[Path]:
        """The folders of what was noted of an app's snapshots."""
        return sorted((self.state / "snapshots/default" / app).glob("*/*"))

    def about(self, root: Path) -> dict[str, Any]:
        """What is known of a snapshot."""
        return dict(json.loads(root.read_text())["about"])

    def forge(self, root: Path, **changes: Any) -> None:
        """Changes what is known of a snapshot."""
        document = json.loads(root.read_text())
        document["about"] |= changes
        root.write_text(json.dumps(document))

    def shelf(self) -> Shelf:
        """The default tenant's snapshots, as the open node has them."""
        return Shelf(self.node._images.opened().store("default"), "snapshots")

    def objects(self, root: Path) -> dict[str, Path]:
        """The files of a snapshot that are objects: place in the image → file of the object."""
        shelf = self.shelf()
        found = shelf.paths(shelf.read(root.name).image)
        return {place: shelf.local.path(name) for name, place in found.items()}

    def places(self, root: Path) -> set[str]:
        """All files of a snapshot, also those that are no objects."""
        shelf = self.shelf()
        tree = load_tree(shelf.store, shelf.read(root.name).image)
        return {path.decode() for path, node in walk(tree) if not node.is_folder}

    def replace_file(self, root: Path, place: str, content: bytes) -> None:
        """Makes another content of one of its files what was "captured"."""
        shelf = self.shelf()
        shelved = shelf.read(root.name)
        tree = read_index(shelf.store.read(shelved.image.index))
        node = dict(walk(tree))[place.encode()]
        node.size, node.inline, node.content = len(content), None, None
        if len(content) <= INLINE_LIMIT_BYTES:
            node.inline = content
        else:
            node.content = shelf.store.put_bytes(content)
        index = shelf.store.put_bytes(b"".join(build_index(tree)))
        listing = put_list(shelf.store, [*contents(tree), index])
        shelf.write(replace(shelved, image=replace(shelved.image, index=index, list=listing)))

    def leftovers(self) -> list[str]:
        """What is still on the machine of this state folder, or of replicas named here.

        While the node is open its frozen layers and the mounts of its images are not counted.
        """
        owned = owned_by(self.state)
        if self._node:
            own = tuple(str(self.state.resolve() / part) for part in ("node/layers", "files"))
            kinds = ("layer folder", "file daemon")
            owned = [o for o in owned if o.kind not in kinds and not o.name.startswith(own)]
        found = [f"{thing.kind} {thing.name}" for thing in owned]
        found += [f"control group {path}" for path in self._groups() if path.is_dir()]
        named = processes_naming(self.prefix)
        found += [f"process {pid}" for pid in (*named, *self._orphans())]
        return sorted(set(found))

    def _groups(self) -> list[Path]:
        """Control groups, in the unified hierarchy and in one per controller."""
        mount, own = Path("/sys/fs/cgroup"), f"nagara/*{self.prefix}-*"
        return [*mount.glob(own), *mount.glob(f"*/{own}")]

    def _orphans(self) -> list[int]:
        """What fell to the keeper and is no replica's first process: of a torn start."""
        keepers = processes_naming(f"{self.state}/node/keeper.sock", of_keeper=True)
        firsts = set(processes_naming(self.prefix))
        return [pid for pid in children_of(set(keepers)) if pid not in firsts]

    def force_away(self) -> None:
        """The last resort, so that a failed test leaves the machine to others."""
        for pid in processes_naming(f"{self.state}/node/keeper.sock", of_keeper=True):
            os.kill(pid, signal.SIGKILL)
        kill_tools_in(self.state)
        for path in self._groups():
            thaw_cgroup(path.name)
            kill_cgroup(path.name)
            remove_cgroup(path.name)
        for pid in processes_naming(self.prefix):
            os.kill(pid, signal.SIGKILL)
        unmount_tree(self.state)


def children_of(parents: set[int]) -> list[int]:
    """Processes, other than ended ones, whose parent is one of these."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) in parents and state != "Z":
                found.append(int(entry.name))
    return found


def processes_naming(text: str, *, of_keeper: bool = False, exact: bool = False) -> list[int]:
    """Processes with `text` in the environment they were started with (or, the keeper, in its
    arguments): replicas are given their name, which begins with `text` or is just that."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                held = (entry / ("cmdline" if of_keeper else "environ")).read_bytes()
            except OSError:
                continue
            name = f"NAGARA_REPLICA={text}" + ("\0" if exact else "-")
            wanted = text if of_keeper else name
            if wanted.encode() in held:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def make_yard(
    tmp_path_factory: pytest.TempPathFactory, state_dir: Path
) -> Iterator[Callable[..., Yard]]:
    """Makes state folders; `with_tools` where the node is to find runc and CRIU."""
    folders: list[Path] = []

    def make(*, with_tools: bool = True) -> Yard:
        state = tmp_path_factory.mktemp("state")
        if with_tools and (state_dir / "tools").is_dir():
            (state / "tools").symlink_to((state_dir / "tools").resolve())
        folders.append(state)
        return Yard(state)

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


async def taken_down(yard: Yard) -> None:
    """Closes the yard and fails the test that has left something behind."""
    try:
        async with asyncio.timeout(60):
            await yard.close()
        left = yard.leftovers()
        assert left == [], f"left behind: {left}"
        for _ in range(200):  # it answers a moment before it ends
            if not processes_naming(f"{yard.state}/node/keeper.sock", of_keeper=True):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a keeper is left")
    finally:
        yard.force_away()


@pytest.fixture
async def yard(make_yard: Callable[..., Yard], tools: Tools) -> AsyncIterator[Yard]:
    """A node with containers and snapshots, for one test."""
    yard = make_yard()
    try:
        await yard.open()
        yield yard
    finally:
        await taken_down(yard)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(make_yard: Callable[..., Yard], tools: Tools) -> AsyncIterator[Yard]:
    """A node with containers and snapshots, for the tests of one module."""
    yard = make_yard()
    try:
        await yard.open()
        yield yard
    finally:
        await taken_down(yard)
