"""The machines of a Ray cluster: what of Ray fails, fails nobody who is served."""

import importlib.util
import time

import pytest
from cluster_ledger import TICKING, Client, lives, overlaps

from nagara.cli.lab_cluster import wait_for
from nagara.cli.lab_machines import LabMachine, LaboratoryError

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
