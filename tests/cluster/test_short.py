"""Three machines, one cut off, in every run of the tests; `make test-cluster` has more."""

from pathlib import Path

import pytest
from cluster_ledger import TICKING, Client, lives, overlaps

from nagara.cli.lab_cluster import wait_for
from nagara.pool.lease import TTL_S
from nagara.testing.certificates import new_authority

from .conftest import MakeCluster

pytestmark = [pytest.mark.root, pytest.mark.slow]

APP = "obedient"


def test_a_machine_that_is_cut_off_is_replaced_and_no_request_is_lost(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    authority = new_authority()
    folders = [authority.member(tmp_path / f"pki/{number}") for number in range(3)]
    with cluster(3, devices=1, certificates=folders) as made:
        made.deploy(
            "host", "scale = {min = 1, max = 1, concurrency = 4}", first=TICKING, snapshot=False
        )
        made.until_ready(2)
        with Client(made, f"/{APP}/") as client:
            wait_for(lambda: client.replica, "nobody answers")
            cut, before = made.machine_of(client.replica), client.replica
            cut.link.cut()
            replaced_s = made.until_another_answers(client, before)
        assert client.lost == []
        assert overlaps(lives(made, APP)) == []
        assert replaced_s < TTL_S + 10.0  # five more: other tests may run on these cores
