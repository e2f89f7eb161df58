"""Images and snapshots between machines: made once, found by all, fetched by need."""

import pytest

from nagara.cli.lab_cluster import wait_for

from .conftest import MakeCluster, is_long

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400), is_long]

LOST = "avx2"


def test_what_one_machine_made_starts_on_the_others_that_it_fits(cluster: MakeCluster) -> None:
    def prepare(machines):
        machines[3].lose_cpu_flags([LOST])

    with cluster(4, prepare=prepare) as made:
        first, one, other, lesser = made.lab.machines
        made.deploy(made.venv())
        made.until_ready(3)

        made.only(one)  # it has never seen the image's source
        assert made.get("/obedient/canary")[1] == b"the canary sings"
        (plain,) = made.starts()
        assert (plain["kind"], plain["files"]["way"]) == ("plain", "lazy")
        assert "zone@10.77.0.1:7070" in [tier["tier"] for tier in plain["files"]["tiers"]]
        capture = made.instance().admin.wait_for_capture("obedient", timeout_s=120)
        assert capture["state"] == "done", capture
        (snapshot,) = made.roots(one, "snapshots")
        assert snapshot in made.roots(first, "snapshots"), "it was not brought to the zone"
        assert made.roots(other, "snapshots") == []

        made.instance().admin.fold("obedient")
        made.only(other)
        assert made.get("/obedient/canary")[1] == b"the canary sings"
        restored = made.starts()[0]
        assert (restored["kind"], restored["fallback"]) == ("restored", None)
        assert snapshot.endswith(restored["snapshot"])

        made.instance().admin.fold("obedient")
        made.only(lesser)
        assert made.get("/obedient/canary")[1] == b"the canary sings"
        misfit = made.starts()[0]
        assert misfit["kind"] == "plain"
        assert LOST in misfit["fallback"]
        wait_for(lambda: len(made.roots(lesser, "snapshots")) == 1, "it makes none of its own")
        (own,) = made.roots(lesser, "snapshots")
        assert own != snapshot
        wait_for(lambda: own in made.roots(first, "snapshots"), "it is not brought to the zone")
        made.instance().admin.fold("obedient")
        assert made.get("/obedient/canary")[1] == b"the canary sings"
        assert (made.starts()[0]["kind"], made.starts()[0]["fallback"]) == ("restored", None)
        assert len(made.roots(one, "snapshots")) == 1, "another machine's kind is of no use there"
