"""The agent's capabilities, as the DaemonSet names them: enough, and each of them needed.

An agent is started with exactly these, and one for each of them with all but that one; each goes
through a start, a snapshot and a restore.
"""

import asyncio
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nagara.base.errors import NagaraError
from nagara.contract.node import NodeUnavailableError
from nagara.contract.replica import Canary, CaptureOrder, Lease, ReplicaSpec, StartKind, StartOrder
from nagara.node.remote_node import RemoteNode

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"  # a user who is nobody may read it
APP = (ROOT / "tests/apps/obedient.py").read_text()
AS_NOBODY = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
AT_ONCE = 3
ALL = "all of them"
# What an agent with all of them comes to.
WHOLE = ["plain", "saved", "restored", "another user's process judged"]

pytestmark = pytest.mark.root


def needed() -> list[str]:
    """As in the DaemonSet; another test compares the unit with it."""
    (document,) = yaml.safe_load_all((ROOT / "packaging/kubernetes/agent.yaml").read_text())
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return sorted(container["securityContext"]["capabilities"]["add"])


def to_be_had() -> set[str]:
    dumped = subprocess.run(["setpriv", "--dump"], capture_output=True, text=True, check=True)
    bounds = re.search(r"Capability bounding set: (.*)", dumped.stdout)
    assert bounds is not None
    return {name.upper() for name in bounds[1].split(",")}


def spec(name: str, code: str) -> ReplicaSpec:
    return ReplicaSpec(
        tenant="default", app=name, definition="d", image="host",
        command=(PYTHON, "-S", "-c", code), port=8000, ready_path="/", canary=Canary("/canary"),
        env=(("LISTEN", "${PORT}"),), start_timeout_s=60.0,
    )  # fmt: skip


async def steps(node: RemoteNode, done: list[str]) -> None:
    """Goes as far as it can; `done` says how far. Raises `NagaraError`."""
    prefix = f"rights-{secrets.token_hex(4)}"
    own, other = spec("own", APP), spec("other", AS_NOBODY + APP)
    started = await node.start(StartOrder(f"{prefix}-1", Lease("a", 1), own))
    done.append(started.kind)
    await node.stop(f"{prefix}-1", grace_s=0)
    report = await node.capture(CaptureOrder(f"{prefix}-2", Lease("a", 2), own))
    if report.snapshot is None:
        return
    done.append("saved")
    started = await node.start(StartOrder(f"{prefix}-3", Lease("a", 3), own))
    await node.stop(f"{prefix}-3", grace_s=0)
    if started.kind is not StartKind.RESTORED:
        return
    done.append("restored")
    report = await node.capture(CaptureOrder(f"{prefix}-4", Lease("a", 4), other))
    if report.snapshot or "CAP_SYS_RESOURCE" in (report.reason or ""):
        done.append("another user's process judged")
    if report.snapshot:
        done.append("another user's process saved")


async def life(rights: set[str], state: Path, tools: Path) -> list[str]:
    """What an agent with these rights alone comes to."""
    (state / "tools").symlink_to(tools)
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in sorted(rights & to_be_had()))])
    agent = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "agent"]
    process = await asyncio.create_subprocess_exec(
        "setpriv", "--bounding-set", kept, *agent, stderr=subprocess.DEVNULL
    )
    done: list[str] = []
    try:
        node = RemoteNode(state / "agent.sock")
        while process.returncode is None:
            try:
                facts = await node.facts()
                break
            except NodeUnavailableError:
                await asyncio.sleep(0.02)
        else:
            return ["the agent ended"]
        if facts.isolation == "container":
            await steps(node, done)
    except NagaraError as error:
        done.append(f"failed: {error.what}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        clear = [*agent[:-1], "doctor", "--leaks", "--clear"]
        done_clearing = await asyncio.create_subprocess_exec(*clear, stdout=subprocess.DEVNULL)
        await done_clearing.wait()
    return done


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> dict[str, list[str]]:
    """By what the agent lacked."""
    if shutil.which("setpriv") is None or not Path(PYTHON).exists():
        pytest.skip(f"needs setpriv and {PYTHON}")
    rights, tools = set(needed()), (state_dir / "tools").resolve()

    async def all_lives() -> dict[str, list[str]]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(lacking: str) -> list[str]:
            async with gate:
                return await life(rights - {lacking}, tmp_path_factory.mktemp("agent"), tools)

        names = [ALL, *sorted(rights)]
        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))

    return asyncio.run(all_lives())


def test_an_agent_with_these_rights_starts_saves_and_restores(lives: dict[str, list[str]]) -> None:
    assert lives[ALL][: len(WHOLE)] == WHOLE


@pytest.mark.parametrize("lacking", needed())
def test_an_agent_that_lacks_one_of_them_does_less(
    lives: dict[str, list[str]], lacking: str
) -> None:
    if lacking not in to_be_had():
        pytest.skip(f"this process lacks CAP_{lacking} itself")
    assert lives[lacking] != lives[ALL]
