"""kill -9 of agent, keeper, runtime and checkpoint tool at every step: nothing tears.

One state folder lives through all of it, with a healthy replica (the bystander) on it that must
be taken over every time.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from nagara.contract.node import NodeError, NodeUnavailableError
from nagara.contract.replica import CaptureOrder, Lease, StartOrder
from nagara.node.remote_node import RemoteNode
from nagara.sandbox.fault_points import POINTS, VARIABLE
from nagara.store.collecting import collect_local
from nagara.store.local import ObjectFolder

from .conftest import processes_naming

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

AGENT_POINTS = [f"{group}.{name}" for group, names in POINTS.items() for name in names]
KEEPER_POINTS = [point for point in AGENT_POINTS if point.startswith("keeper.")]
AGENT_POINTS = [point for point in AGENT_POINTS if point not in KEEPER_POINTS]

# `runc` and `criu` that kill themselves a while after they were started, if a test wants that.
WRAPPER = """#!/bin/sh
if read -r verb delay 2>/dev/null < {armed}; then
    case " $* " in *" $verb "*)
        rm {armed}
        (sleep "$delay"; kill -9 $$) >/dev/null 2>&1 & ;;
    esac
fi
exec {real} "$@"
"""


class House:
    """A state folder, the agent on it, and a bystander."""

    def __init__(self, yard, tools, folder):
        self.yard = yard
        self.fault = folder / "fault"
        self.tool_fault = folder / "tool-fault"
        (folder / "bin").mkdir()
        own_tools = yard.state / "tools"
        own_tools.unlink()
        (own_tools / "criu").mkdir(parents=True)
        for path, real in (
            (folder / "bin/runc", tools.runc),
            (own_tools / "criu/criu", tools.criu),
        ):
            path.write_text(WRAPPER.format(armed=self.tool_fault, real=real))
            path.chmod(0o755)
        self.env = {VARIABLE: str(self.fault), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        self.node = RemoteNode(yard.state / "agent.sock")
        self.yard.through = self.node
        self.agent = 0
        self.bystander = ""
        self.saved_at = None
        far = folder / "far"
        far.mkdir()
        (yard.state / "store").mkdir(mode=0o700)
        tier = {"kind": "folder", "path": str(far), "name": "far"}
        (yard.state / "store/settings.json").write_text(json.dumps({"tiers": [tier]}))
        self.good = yard.spec(app="good", env={"FIRST": "hoard = b'x' * (30 << 20)"})
        self.starter = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent.parent / "apps/agents.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def save_good(self):
        """Makes the snapshot, again where packages of this machine have changed meanwhile."""
        packages = Path("/var/lib/dpkg/status")
        state = packages.stat().st_mtime_ns if packages.exists() else 0
        if state != self.saved_at:
            assert (await self.yard.capture(self.good)).reason is None
            for root in self.yard.roots("broken"):
                root.unlink()
            self.saved_at = state

    async def begin(self):
        """Starts an agent and waits until it answers."""
        order = {"state": str(self.yard.state), "env": self.env}
        self.starter.stdin.write(json.dumps(order).encode() + b"\n")
        self.starter.stdin.flush()
        self.agent = int(self.starter.stdout.readline())
        for _ in range(1000):
            with contextlib.suppress(NodeUnavailableError):
                await self.node.facts()
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the agent does not answer")

    async def until_dead(self):
        for _ in range(1000):
            if not Path(f"/proc/{self.agent}").exists():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the agent lives")

    async def begin_bystander(self):
        self.bystander = (await self.yard.start()).replica
        await self.yard.tell(self.bystander, "kept = 'in memory'")

    async def check(self):
        """The bystander is well, it is alone, and nothing of anything else is left."""
        names = {status.replica for status in await self.node.replicas()}
        assert names == {self.bystander}
        assert await self.yard.tell(self.bystander, "answer = kept") == "in memory"
        left = [thing for thing in self.leftovers() if self.bystander not in thing]
        assert left == []
        assert self.unneeded_objects() == 0

    def unneeded_objects(self):
        """How many objects of the store no snapshot needs."""
        folder = ObjectFolder(self.yard.state / "store")
        try:
            return collect_local(folder.tenant("default"), 0.0, is_dry=True).removed
        finally:
            folder.close()

    def leftovers(self):
        """Without what a running agent keeps: frozen layers, the file daemon and its mount."""
        kept = [str(self.yard.state.resolve() / part) for part in ("node/layers", "files")]
        kept += ["layer folder", "file daemon"]
        bystanders = {f"process {pid}" for pid in processes_naming(self.bystander, exact=True)}
        found = set(self.yard.leftovers()) - bystanders
        return sorted(thing for thing in found if not any(part in thing for part in kept))

    def end(self):
        for pid in (self.agent, self.starter.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.starter.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(make_yard, tools, tmp_path_factory):
    yard = make_yard()
    house = House(yard, tools, tmp_path_factory.mktemp("faults"))
    try:
        await house.begin()
        await house.begin_bystander()
        await house.save_good()
        yield house
        house.tool_fault.unlink(missing_ok=True)
        house.fault.unlink(missing_ok=True)
        await yard.stop(house.bystander)
        os.kill(house.agent, signal.SIGTERM)
        await house.until_dead()
        assert yard.leftovers() == []
    finally:
        house.end()
        yard.force_away()


async def act(house, group):
    """Does what leads through the points of a group. Returns the outcome or the error."""
    yard, name = house.yard, house.yard.name()
    lease = Lease("slot", 1)
    try:
        if group in ("start", "launch"):
            return await house.node.start(StartOrder(name, lease, yard.spec()))
        if group == "restore":
            return await house.node.start(StartOrder(name, lease, house.good))
        if group == "fallback":
            return await house.node.start(StartOrder(name, lease, await broken(house)))
        if group == "capture":
            return await house.node.capture(CaptureOrder(name, lease, yard.spec(app="taken")))
        assert group in ("stop", "clear")
        first = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"
        await house.node.start(StartOrder(name, lease, yard.spec(env={"FIRST": first})))
        return await house.node.stop(name, grace_s=0.1)
    except NodeError as error:
        return error


async def broken(house):
    """An app whose snapshot gives a wrong answer."""
    spec = house.yard.spec(app="broken")
    if not house.yard.roots("broken"):
        assert (await house.yard.capture(spec)).reason is None
        (root,) = house.yard.roots("broken")
        house.yard.forge(root, canary_answer="200 another")
    for noted in house.yard.notes("broken"):
        shutil.rmtree(noted)
    return spec


@pytest.mark.parametrize("point", AGENT_POINTS)
async def test_an_agent_killed_at_any_point_is_followed_by_one_that_finds_all_well(house, point):
    group = point.split(".")[0]
    await house.save_good()
    if group == "fallback":
        await broken(house)
    house.fault.write_text(f"kill {point}")
    outcome = await act(house, group)
    assert not house.fault.exists(), f"{point} was not reached: {outcome}"
    assert isinstance(outcome, NodeUnavailableError)
    await house.until_dead()
    await house.begin()
    if point == "start.recorded":  # it was ready, so it was taken over
        (other,) = {s.replica for s in await house.node.replicas()} - {house.bystander}
        assert (await house.yard.ask(other)).body == b"ready"
        await house.yard.stop(other)
    await house.check()
    report = await house.yard.start(house.good)
    assert report.kind == "restored"
    assert (await house.yard.ask(report.replica)).body == b"ready"
    await house.yard.stop(report.replica)
    await house.check()


@pytest.mark.parametrize("point", [point for point in AGENT_POINTS if "restore." in point])
async def test_an_agent_killed_while_a_snapshot_comes_from_elsewhere_leaves_nothing(house, point):
    await house.save_good()
    house.yard.command("push", "good", "--to", "far")
    house.yard.command("rm", "good")
    house.fault.write_text(f"kill {point}")
    outcome = await act(house, "restore")
    assert not house.fault.exists(), f"{point} was not reached: {outcome}"
    assert isinstance(outcome, NodeUnavailableError)
    await house.until_dead()
    await house.begin()
    await house.check()
    report = await house.yard.start(house.good)
    assert (report.kind, report.fallback) == ("restored", None)
    await house.yard.stop(report.replica)
    await house.check()


@pytest.mark.parametrize("point", AGENT_POINTS)
async def test_a_disk_that_is_full_at_any_point_is_an_error_and_leaves_nothing(house, point):
    group = point.split(".")[0]
    await house.save_good()
    if group == "fallback":
        await broken(house)
    house.fault.write_text(f"full {point}")
    outcome = await act(house, group)
    assert not house.fault.exists(), f"{point} was not reached: {outcome}"
    if group == "restore":
        assert outcome.kind == "plain"
        assert "No space left" in outcome.fallback
        await house.yard.stop(outcome.replica)
    elif group == "capture" and not isinstance(outcome, NodeError):
        assert outcome.snapshot is None
        assert "No space left" in outcome.reason
    elif point == "stop.asked":
        assert outcome is None  # it is ended without being asked
    else:
        assert isinstance(outcome, NodeError)
        assert "No space left" in str(outcome)
        assert "free space" in str(outcome)
    for status in await house.node.replicas():
        if status.replica != house.bystander:
            assert group in ("stop", "clear")
            await house.yard.stop(status.replica)
    await house.check()


@pytest.mark.parametrize("point", KEEPER_POINTS)
async def test_a_keeper_killed_at_any_point_is_replaced_and_its_replicas_are_cleared(house, point):
    house.fault.write_text(f"kill {point}")
    outcome = await act(house, "stop" if point in ("keeper.ended", "keeper.forgotten") else "start")
    assert not house.fault.exists(), f"{point} was not reached: {outcome}"
    for _ in range(500):
        ended = {s.replica: s.exit_code for s in await house.node.replicas() if not s.ready}
        if ended.get(house.bystander) == -9:
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("nobody noticed that the bystander is gone")
    for status in await house.node.replicas():
        await house.yard.stop(status.replica)
    house.bystander = "nobody"
    assert house.leftovers() == []
    await house.begin_bystander()
    await house.check()


RUNTIME_MOMENTS = {
    "run": (0, 0.02, 0.04, 0.08, 0.12),
    "restore": (0, 0.02, 0.05, 0.08, 0.12, 0.16, 0.25),
    "checkpoint": (0, 0.05, 0.1),
    "pause": (0, 0.01),
    "delete": (0, 0.02),
}
TOOL_MOMENTS = {
    "restore": (0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.16),
    "checkpoint": (0, 0.03, 0.06),
}
ACTIVITY = {"run": "start", "checkpoint": "capture", "pause": "capture", "delete": "stop"}


async def kill_and_check(house, verb, activity, moment_s):
    await house.save_good()
    house.tool_fault.write_text(f"{verb} {moment_s}\n")
    outcome = await act(house, ACTIVITY.get(activity, activity))
    was_reached = not house.tool_fault.exists()
    for status in await house.node.replicas():
        if status.replica != house.bystander:
            assert (await house.yard.ask(status.replica)).body == b"ready"
            await house.yard.stop(status.replica)
    await house.check()
    assert was_reached, f"{activity} was not reached: {outcome}"


@pytest.mark.parametrize("verb", RUNTIME_MOMENTS)
async def test_a_runtime_killed_at_any_moment_leaves_nothing(house, verb):
    for moment_s in RUNTIME_MOMENTS[verb]:
        await kill_and_check(house, verb, verb, moment_s)


@pytest.mark.parametrize("activity", TOOL_MOMENTS)
async def test_a_checkpoint_tool_killed_at_any_moment_leaves_nothing(house, activity):
    for moment_s in TOOL_MOMENTS[activity]:
        await kill_and_check(house, "swrk", activity, moment_s)


@pytest_asyncio.fixture(loop_scope="module")
async def sealed(house, tmp_path):
    """An app with a snapshot that is encrypted."""
    pytest.importorskip("cryptography", reason="needs the extra `coded`")
    key = tmp_path / "default.key"
    key.touch(mode=0o600)
    key.write_bytes(base64.b64encode(os.urandom(32)))
    settings = house.yard.state / "snapshots/sealing.json"
    settings.write_text(json.dumps({"key_folder": str(tmp_path)}))
    spec = house.yard.spec(app="sealed")
    assert (await house.yard.capture(spec)).reason is None
    yield spec
    settings.unlink()


@pytest.mark.parametrize("point", ["restore.image", "restore.layer", "restore.running"])
async def test_an_agent_killed_with_an_opened_snapshot_in_memory_leaves_nothing_of_it(
    house, sealed, point
):
    house.fault.write_text(f"kill {point}")
    with pytest.raises(NodeUnavailableError):
        await house.yard.start(sealed)
    assert not house.fault.exists(), f"{point} was not reached"
    await house.until_dead()
    state = str(house.yard.state.resolve())
    await house.begin()
    mounted = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [line for line in mounted if state in line and " ramfs " in line] == []
    await house.check()
    report = await house.yard.start(sealed)
    assert (report.kind, report.fallback) == ("restored", None)
    await house.yard.stop(report.replica)
    await house.check()


async def test_the_snapshot_is_still_good_after_all_of_this(house):
    await house.save_good()
    report = await house.yard.start(house.good)
    assert report.kind == "restored", report.fallback
    await house.yard.stop(report.replica)
    shutil.rmtree(house.yard.state / "snapshots/default/broken", ignore_errors=True)
