"""The machines of a Ray cluster: what of Ray fails, fails nobody who is served."""

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster_ledger import TICKING, Client, lives, overlaps

from nagara.cli.lab_cluster import wait_for
from nagara.cli.lab_machines import Inside, LabMachine, LaboratoryError, laboratory

from .conftest import Cluster, MakeCluster, is_long

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    is_long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]

APP = "obedient"
ACTOR = "ray::MachineActor"  # as Ray calls its process; its own agents end the node with them


def pids(machine: LabMachine, part: str) -> list[int]:
    """Processes of the machine whose command has this in it, as the machine numbers them."""
    try:
        return [int(pid) for pid in machine.spaces.run("pgrep", "-f", part).split()]
    except LaboratoryError:  # there is none
        return []


def kill(machine: LabMachine, part: str) -> list[int]:
    """Kills them, and says which they were."""
    found = pids(machine, part)
    assert found, f"no process is called {part}"
    machine.spaces.run("kill", "-KILL", *map(str, found))
    return found


def goes_on(made: Cluster, client: Client, replica: str) -> None:
    asked, until_s = len(client.answers), time.monotonic() + 5.0
    wait_for(
        lambda: len(client.answers) > asked + 10 and time.monotonic() > until_s, "it does not go on"
    )
    assert client.replica == replica
    assert client.lost == []


def test_ray_may_lose_workers_and_its_head_while_replicas_serve(cluster: MakeCluster) -> None:
    with cluster(3, with_ray=True) as made:
        made.deploy(
            made.venv(), "scale = {min = 1, max = 1, concurrency = 4}", first=TICKING,
            snapshot=False,
        )  # fmt: skip
        made.until_ready(2, 300.0)  # one that fails its checks under load is asked for again
        with Client(made, f"/{APP}/") as client:
            wait_for(lambda: client.replica, "nobody answers")
            machine, replica = made.machine_of(client.replica), client.replica
            worker = kill(machine, ACTOR)
            goes_on(made, client, replica)
            wait_for(lambda: set(pids(machine, ACTOR)) - set(worker), "Ray makes no new one")
            goes_on(made, client, replica)
            kill(made.first, "gcs_server")
            goes_on(made, client, replica)
            machine.link.cut()  # leases end without Ray, too
            wait_for(lambda: client.replica != replica, "it is not replaced")
            machine.link.heal()
        assert client.lost == []
        assert overlaps(lives(made, APP)) == []


RAY = (sys.executable, "-P", "-m", "ray.scripts.scripts")


def environment(machine: LabMachine) -> dict[str, str]:
    """Ray keeps its files in the machine's own folder, as all machines share /tmp."""
    return {**os.environ, **machine.environment, "RAY_TMPDIR": "/run"}


def begin(machine: LabMachine, *arguments: str) -> Inside:
    """`nagara up` with a head of its own, once it serves."""
    (machine.folder / "up.log").unlink(missing_ok=True)
    up = machine.nagara(
        "up", "--cluster", "head:6400", *arguments, log="up.log", env=environment(machine)
    )
    wait_for(lambda: "API key:" in up.said() or up.exit_code is not None, "it does not serve")
    assert up.exit_code is None, up.said()
    return up


def test_a_head_of_ones_own_is_joined_with_what_it_prints_and_outlives_nagara(
    tmp_path: Path, state_dir: Path, tools: object
) -> None:
    with laboratory(tmp_path / "lab", 2) as lab:
        first, second = lab.machines
        for machine in lab.machines:
            machine.spaces.run("ip", "route", "add", "default", "dev", "eth0")  # Ray looks for it
        made = Cluster(lab, state_dir)
        try:
            with first.entered():
                from_nothing_to_an_answer(made)
        finally:
            print(made.logs())
        for machine in (second, first):
            machine.spaces.run(*RAY, "stop", env=environment(machine))
            assert pids(machine, "gcs_server|raylet/raylet") == []


def from_nothing_to_an_answer(made: Cluster) -> None:
    first, (second,) = made.first, made.others
    up = begin(first)
    join = re.search(r"ray (start --address=10\S+:6400)$", up.said(), re.MULTILINE)
    assert join is not None
    second.spaces.run(
        *RAY, *join[1].split(), "--object-store-memory=80000000", env=environment(second)
    )
    made.deploy("host", snapshot=False)
    made.until_ready(1, 300.0)
    admin = made.instance().admin
    (own,) = (one for one in admin.pool()["machines"] if not one["address"])
    admin.order_machine(own["name"], "drain")
    status, body, _ = made.get(f"/{APP}/")
    assert (status, body) == (200, b"ready")
    assert made.replicas_on(second)
    assert re.search(r"Traceback|\d{4}-\d\d-\d\d|\bW\b", up.said()) is None, "Ray's own noise"
    assert up.end(signal.SIGINT) == 0
    assert pids(first, "gcs_server")
    up = begin(first)
    assert join[0] in up.said(), "not the head that runs already"
    assert up.end(signal.SIGINT) == 0
