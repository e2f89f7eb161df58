"""`nagara up --cluster` on a real Ray: replicas on its machines, served also without its head."""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import RayCluster

from nagara.image.mounts import unmount_tree
from nagara.node.leftovers import owned_by

from .conftest import Up

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RayCluster]:
    yield from ended(RayCluster(tmp_path), tmp_path)


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster whose autoscaler may add one machine."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'nagara[cluster]'")
    from ray_cloud import scaled_cluster

    yield from ended(scaled_cluster(tmp_path, 1, is_v2=True), tmp_path)


def ended(cluster: RayCluster, tmp_path: Path) -> Iterator[RayCluster]:
    """The cluster, which ends with all of its machines after the test."""
    try:
        yield cluster
    finally:
        cluster.end()
        for machine in tmp_path.iterdir():  # after a failure, too, nothing of any may be left
            if (machine / "node").exists():
                Up(machine).run("doctor", "--leaks", "--clear")
                unmount_tree(machine)


def until(condition: Callable[[], Any], what: str, limit_s: float = 300.0) -> Any:
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, what
        time.sleep(0.2)
    return found


def test_replicas_run_on_machines_of_ray_and_go_on_without_its_head(
    up: Any, ray: RayCluster, state_dir: Path
) -> None:
    state = ray.folder / "m1"
    state.mkdir()
    (state / "tools").symlink_to((state_dir / "tools").resolve())
    ray.join("m1")
    up.begin("--cluster", ray.address, "--slots", "1")
    up.deploy(up.obedient(snapshot=False))

    def machine_of_ray() -> Any:
        found = [one for one in up.admin.pool()["machines"] if one["provider"] == "ray"]
        return found[0] if found and found[0]["state"] == "ready" else None

    try:
        machine = until(machine_of_ray, "no machine of Ray becomes ready")
    except AssertionError as error:
        raise AssertionError(f"{up.admin.pool()}\n{up.admin.pool_plan()}") from error
    (here,) = (one for one in up.admin.pool()["machines"] if one["provider"] == "local")
    up.run("pool", "drain", here["name"])
    key = up.admin.add_key("test")
    status, body, headers = up.get("/obedient/", key=key)
    assert (status, body) == (200, b"ready")
    replica = headers["x-nagara-replica"]
    assert any(replica in one.name for one in owned_by(state)), "it is not on Ray's machine"
    listed = up.run("machines").stdout
    assert machine["address"] in listed
    assert machine["name"] in listed
    ray.kill("gcs_server")
    ray.kill("raylet")
    for _ in range(20):
        status, _, headers = up.get("/obedient/", key=key)
        assert (status, headers["x-nagara-replica"]) == (200, replica)
        time.sleep(1.0)  # longer than a lease lasts
    assert up.admin.fold("obedient") == 1
    until(lambda: up.admin.pool()["leased"] == 0, "the slot does not come back")


POOL = """
[pool]
least_free = {least_free}
spare_machines = 0

[provider.here]
kind = "local"
slots = 4

[provider.cluster]
kind = "ray"
address = {address}
adds = [{{type = "cpu", cpu = 2}}]
"""


@pytest.mark.skipif(
    not os.environ.get("NAGARA_CLUSTER"), reason="make test-cluster runs it: it takes minutes"
)
def test_rays_autoscaler_adds_what_the_plan_wants_and_removes_it_again(
    up: Any, scaled: RayCluster, state_dir: Path
) -> None:
    state = scaled.folder / "added-1"
    state.mkdir()
    (state / "tools").symlink_to((state_dir / "tools").resolve())
    file = scaled.folder / "pool.toml"
    address = json.dumps(scaled.address)
    file.write_text(POOL.format(least_free=5, address=address))  # one more than this machine has
    up.begin("--pool", str(file))
    up.deploy(up.obedient(snapshot=False))

    def added() -> list[Any]:
        return [one for one in up.admin.pool()["machines"] if one["provider"] == "cluster"]

    try:
        until(lambda: any(one["state"] == "ready" for one in added()), "none is added")
    except AssertionError as error:
        raise AssertionError(f"{up.admin.pool()}\n{up.admin.pool_plan()}") from error
    (here,) = (one for one in up.admin.pool()["machines"] if one["provider"] == "local")
    up.run("pool", "drain", here["name"])
    status, body, headers = up.get("/obedient/", key=up.admin.add_key("test"))
    assert (status, body) == (200, b"ready")
    assert any(headers["x-nagara-replica"] in one.name for one in owned_by(state))
    assert len(scaled.processes("raylet/raylet")) == 2
    up.run("pool", "drain", here["name"], "--resume")
    assert up.end() == 0
    file.write_text(POOL.format(least_free=0, address=address))
    up.begin("--pool", str(file))
    until(lambda: not added(), "it is not given back", 600.0)
    until(lambda: len(scaled.processes("raylet/raylet")) == 1, "the autoscaler does not remove it")
