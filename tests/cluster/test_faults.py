"""Machines, links, agents, disks and control fail under a client that never rests.

Asserted each time: no idempotent request is lost, no two replicas of an app that has one live at
the same time, and what was cut off is replaced within its lease's time and five seconds.
"""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from cluster_ledger import TICKING, Client, lives, overlaps

from nagara.cli.lab_cluster import wait_for
from nagara.cli.lab_machines import LabMachine
from nagara.pool.lease import SKEW_S, TTL_S

from .conftest import Cluster, MakeCluster, is_long

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400), is_long]

APP = "obedient"
# From a cut to the new replica's start; see `Cluster.until_another_answers`.
REPLACED_S = TTL_S + 5.0


@pytest.fixture
def made(cluster: MakeCluster) -> Iterator[Cluster]:
    """Three machines, an app with one replica on one of the two others."""
    with cluster(3) as running:
        running.deploy(
            running.venv(), "scale = {min = 1, max = 1, concurrency = 4}", first=TICKING,
            snapshot=False,
        )  # fmt: skip
        running.until_ready(2)
        assert running.get(f"/{APP}/")[0] == 200
        yield running


def holder(made: Cluster, client: Client) -> LabMachine:
    """The machine of the replica that answers."""
    wait_for(lambda: client.replica, "nobody answers")
    return made.machine_of(client.replica)


def is_well(made: Cluster, client: Client) -> None:
    assert client.lost == []
    assert overlaps(lives(made, APP)) == []


def test_a_machine_that_is_cut_off_for_good_is_replaced_and_serves_no_more(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        cut = holder(made, client)
        before = client.replica
        cut.link.cut()
        assert made.until_another_answers(client, before) < REPLACED_S
    is_well(made, client)
    (old, new) = lives(made, APP)
    assert (old.replica, old.machine) == (before, cut.name)
    assert new.machine != cut.name
    cut.link.heal()
    wait_for(lambda: len(made.ready_machines()) == 2, "it does not come back")
    wait_for(lambda: made.replicas_on(cut) == [], "something is left on it")


def test_a_link_that_is_away_for_a_moment_costs_no_replica(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        cut = holder(made, client)
        before = client.replica
        cut.link.cut()
        time.sleep(3)
        cut.link.heal()
        asked = len(client.answers)
        wait_for(lambda: len(client.answers) > asked + 10, "it does not go on")
        assert client.replica == before
    is_well(made, client)


def test_a_link_that_heals_after_the_lease_brings_no_second_holder_back(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        cut = holder(made, client)
        before = client.replica
        cut.link.cut()
        time.sleep(20)
        cut.link.heal()
        made.until_another_answers(client, before)
        wait_for(lambda: len(made.ready_machines()) == 2, "it does not come back")
    is_well(made, client)
    wait_for(lambda: len(made.replicas_on(cut)) <= 1, "something is left on it")


def test_a_slow_and_leaky_link_is_no_fault(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        slow = holder(made, client)
        before = client.replica
        slow.link.slow(round_trip_ms=50, loss=0.01)
        asked, until_s = len(client.answers), time.monotonic() + TTL_S + SKEW_S
        wait_for(
            lambda: len(client.answers) > asked + 50 and time.monotonic() > until_s,
            "it does not go on",
        )
        assert client.replica == before
        slow.link.heal()
    is_well(made, client)


def test_an_agent_that_is_killed_costs_no_replica(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        machine = holder(made, client)
        before = client.replica
        made.agents[machine.name].end(signal.SIGKILL)
        made.begin_agent(machine)
        asked = len(client.answers)
        wait_for(lambda: len(client.answers) > asked + 10, "it does not go on")
        assert client.replica == before
    is_well(made, client)


def test_an_agent_that_stays_away_is_replaced_with_its_machine(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        machine = holder(made, client)
        before = client.replica
        made.agents[machine.name].end(signal.SIGKILL)
        assert made.until_another_answers(client, before) < REPLACED_S
    is_well(made, client)


def test_control_that_is_killed_and_comes_back_keeps_the_replica(made: Cluster) -> None:
    with Client(made, f"/{APP}/") as client:
        holder(made, client)
        before = client.replica
    assert made.control is not None
    made.control.end(signal.SIGKILL)
    made.begin_control()
    with Client(made, f"/{APP}/") as client:
        wait_for(lambda: client.replica, "nobody answers")
        assert client.replica == before
    is_well(made, client)


def test_control_that_is_away_longer_than_the_leases_finds_no_second_holder(made: Cluster) -> None:
    assert made.control is not None
    made.control.end(signal.SIGKILL)
    wait_for(lambda: _all_ended(made), "a replica outlives its lease", limit_s=60)
    made.begin_control()
    with Client(made, f"/{APP}/") as client:
        wait_for(lambda: client.replica, "nobody answers")
    is_well(made, client)


def _all_ended(made: Cluster) -> bool:
    return all(time.time() - life.ended_s > 1.0 for life in lives(made, APP))


def test_a_machine_whose_disk_is_full_starts_replicas_all_the_same(cluster: MakeCluster) -> None:
    def prepare(machines: list[LabMachine]) -> None:
        machines[1].small_disk("store", 24 << 20)  # the image has six times as much

    with cluster(2, prepare=prepare) as made:
        made.deploy(made.venv(), first=TICKING, snapshot=False)
        made.until_ready(1)
        with Client(made, f"/{APP}/") as client:
            wait_for(lambda: len(client.answers) > 10, "nobody answers")
            assert made.machine_of(client.replica) is made.others[0]
        is_well(made, client)
        size = os.statvfs(f"/proc/{made.others[0].spaces.pid}/root{made.others[0].state}/store")
        assert size.f_blocks * size.f_frsize <= 24 << 20
