"""Two control processes of one PostgreSQL database: the second follows the first.

Asserted each time: no request of a client that tries both is lost, and no two replicas of an app
that has one live at the same time.
"""

import asyncio
import signal
import time
from collections.abc import Iterator

import psycopg
import pytest
from cluster_ledger import TICKING, RetryingClient, lives, overlaps
from postgres_server import PostgresServer, needs_postgres, postgres_server

from nagara.cli.lab_cluster import GATEWAY_PORT, agent_address, wait_for
from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError
from nagara.node.mandate import Mandate
from nagara.node.network.client import AgentNetwork
from nagara.node.network.membership import read_membership
from nagara.node.remote_node import RemoteNode
from nagara.pool.lease import SKEW_S, TTL_S

from .conftest import Cluster, MakeCluster, is_long

pytestmark = [
    pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(500), is_long, needs_postgres,
]  # fmt: skip

APP = "obedient"


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def made(cluster: MakeCluster, server: PostgresServer) -> Iterator[Cluster]:
    """Two machines for control, two that run an app with one replica."""
    with cluster(4, database=server.url, standbys=1) as running:
        scale = "scale = {min = 1, max = 1, concurrency = 4}"
        running.deploy("host", scale, first=TICKING, snapshot=False)
        running.until_ready(2)
        assert running.get(f"/{APP}/")[0] == 200
        yield running


def client_of_both(made: Cluster) -> RetryingClient:
    (second,) = made.standbys
    urls = [made.instance().url, f"http://{second.address}:{GATEWAY_PORT}"]
    return RetryingClient(made, f"/{APP}/", urls)


def take_over(made: Cluster) -> None:
    """The second one serves, and is asked from now on."""
    (second,) = made.standbys
    made.until_serving(second)
    made.asked = second


def goes_on(made: Cluster, client: RetryingClient, replica: str) -> None:
    """For longer than a lease lasts that nobody renews."""
    asked, until_s = len(client.answers), time.monotonic() + TTL_S + SKEW_S
    wait_for(
        lambda: len(client.answers) > asked + 50 and time.monotonic() > until_s, "it does not go on"
    )
    assert {one.replica for one in client.answers[asked + 1 :]} == {replica}


def present_epoch(server: PostgresServer) -> ControlEpoch:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT database, number FROM control_epochs").fetchone()
    assert row is not None
    return ControlEpoch(*row)


def order_under(made: Cluster, epoch: ControlEpoch, replica: str) -> None:
    """What a control process does that has not noticed anything yet: it stops the replica."""

    async def order() -> None:
        mandate = Mandate()
        mandate.epoch = lambda: epoch
        member = read_membership(made.lab.folder, made.lab.folder / "token", None)
        async with AgentNetwork(member) as network:
            address = agent_address(made.machine_of(replica))
            await RemoteNode(network.transport(address), mandate).stop(replica)

    asyncio.run(order())


def test_the_second_follows_one_that_was_killed_with_its_replica(made: Cluster) -> None:
    with client_of_both(made) as client:
        wait_for(lambda: client.replica, "nobody answers")
        before = client.replica
        assert made.control is not None
        made.control.end(signal.SIGKILL)
        take_over(made)
        goes_on(made, client, before)
    assert client.lost == []
    assert [life.replica for life in lives(made, APP)] == [before]


def test_the_second_follows_one_that_reaches_the_machines_but_not_the_database(
    made: Cluster, server: PostgresServer
) -> None:
    first = made.control
    assert first is not None
    with client_of_both(made) as client:
        wait_for(lambda: client.replica, "nobody answers")
        before = client.replica
        made.first.spaces.run("mount", "-t", "tmpfs", "hidden", str(server.folder))
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'nagara'"
            )
        take_over(made)
        wait_for(lambda: first.exit_code is not None, "the first does not end")
        goes_on(made, client, before)
    assert "leaving the replicas" in first.said()
    assert "another control process has taken the state over" in first.said()
    assert client.lost == []
    assert [life.replica for life in lives(made, APP)] == [before]


def test_the_first_acts_no_more_when_it_was_stopped_until_the_second_had_acted(
    made: Cluster, server: PostgresServer
) -> None:
    first = made.control
    assert first is not None
    deposed = present_epoch(server)
    with client_of_both(made) as client:
        wait_for(lambda: client.replica, "nobody answers")
        before = client.replica
        first.send(signal.SIGSTOP)
        take_over(made)
        made.instance().admin.fold(APP)
        wait_for(lambda: client.replica not in ("", before), "it is not started anew")
        after = client.replica
        first.send(signal.SIGCONT)
        wait_for(lambda: first.exit_code is not None, "the first does not end")
        with pytest.raises(DeposedError, match="newer control process"):
            order_under(made, deposed, after)
        goes_on(made, client, after)
    assert first.exit_code == 1
    assert "leaving the replicas" in first.said()
    assert "another control process has taken the state over" in first.said()
    assert client.lost == []
    assert overlaps(lives(made, APP)) == []
    assert [life.replica for life in lives(made, APP)] == [before, after]
    assert present_epoch(server).number > deposed.number
