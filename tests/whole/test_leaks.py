import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nagara.base.linux import mount
from nagara.cli.instance import own_instance
from nagara.control.client import CONTROL_FILE
from nagara.image.mounts import unmount_tree
from nagara.node.replica_folder import ReplicaFolder
from nagara.sandbox.cgroups import PARENT, end_cgroup, hierarchies
from nagara.sandbox.lock_holders import is_locked

from .conftest import wait_for


def leaks(up: Any, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], int]:
    """(exit code, kind → one of that kind, number of orphaned things)."""
    done = up.run("doctor", "--leaks", "--json", *arguments)
    document = json.loads(done.stdout or "{}")
    assert document, done.stderr
    owned = {thing["kind"]: thing for thing in document["owned"]}
    return done.returncode, owned, document["orphaned"]


def kill_all(up: Any) -> None:
    """kill -9 of control and agent; the keeper and its replicas go on."""
    (agent,) = up.agents()
    os.kill(agent, signal.SIGKILL)
    up.process.send_signal(signal.SIGKILL)
    up.process.wait()
    up.process = None


def test_while_nagara_runs_it_answers_for_everything_and_leaves_nothing(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    assert up.get("/obedient/", key=key)[0] == 200
    code, owned, orphaned = leaks(up)
    assert (code, orphaned) == (0, 0), owned
    assert owned["replica folder"]["answered_by"] == "the node agent"
    assert owned["control file"]["answered_by"] == "the control process"
    assert {"process", "socket"} <= set(owned)
    assert up.end() == 0
    wait_for(lambda: not is_locked(up.state / "node/keeper.lock"))
    assert leaks(up) == (0, {}, 0)


@pytest.mark.root
def test_after_a_kill_an_unfinished_replica_is_orphaned_and_the_next_up_clears_it(
    up: Any, tools: object
) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False).replace('"${PORT}"', '"${PORT}", WAIT_S = "60"'))
    key = up.admin.add_key("test")
    asking = subprocess.Popen(
        [sys.executable, "-c", _ASK, up.admin.url + "/obedient/", key],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list((up.state / "node/replicas").glob("*/pid")))
        kill_all(up)
    finally:
        asking.kill()
        asking.wait()
    code, owned, orphaned = leaks(up)
    assert code == 1
    assert orphaned >= 5
    for kind in ("replica folder", "runtime record", "mount", "control group", "control file"):
        assert owned[kind]["answered_by"] is None, kind
    assert "the next `nagara up` clears" in up.run("doctor", "--leaks").stderr
    (up.state / CONTROL_FILE).unlink()  # so that the next one's is waited for
    up.begin()
    assert up.end() == 0
    wait_for(lambda: not is_locked(up.state / "node/keeper.lock"))
    assert leaks(up) == (0, {}, 0)


@pytest.mark.root
def test_ready_replicas_are_kept_not_orphaned_and_clearing_spares_them(
    up: Any, tools: object
) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    kill_all(up)
    code, owned, _ = leaks(up)
    assert code == 1  # sockets and the control file: whom they named is gone
    assert "keeper" in owned["replica folder"]["answered_by"]
    assert owned["control file"]["answered_by"] is None
    assert leaks(up, "--clear")[0] == 0
    up.begin()
    assert up.get("/obedient/", key=key)[2]["x-nagara-replica"] == before


@pytest.mark.root
def test_what_a_killed_measurement_left_is_found_and_cleared(up: Any, tools: object) -> None:
    command = [sys.executable, "-c", _MEASUREMENT, str(up.state), up.obedient(snapshot=False)]
    maker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    with maker.stdout:
        assert maker.stdout.readline() == b"up\n"
        code, owned, _ = leaks(up)
        assert (code, owned["temporary folder"]["answered_by"]) == (0, "the command that made it")
        maker.kill()
        maker.wait()
    (folder,) = up.state.glob("bench-*")
    wait_for(lambda: not is_locked(folder / "control.lock"))
    wait_for(lambda: not is_locked(folder / "node/agent.lock"))
    code, owned, _ = leaks(up)
    assert (code, owned["temporary folder"]["answered_by"]) == (1, None)
    assert "replica folder" not in owned  # its nagara has ended in good order
    assert leaks(up, "--clear") == (0, {}, 0)
    assert list(up.state.glob("bench-*")) == []


@pytest.mark.root
def test_orphans_that_live_and_hold_a_mount_are_ended_and_cleared(up: Any) -> None:
    """A process in a control group that no replica's folder tells of, at work in a mount."""
    group = ReplicaFolder(up.state / "node/replicas/lost").control_group
    folder = up.state / "files/lost"
    folder.mkdir(parents=True)
    mount("nagara-test", folder, "tmpfs", 0, "size=64k")
    orphan = subprocess.Popen(["sleep", "600"], cwd=folder)
    try:
        for hierarchy in hierarchies():
            if hierarchy.name == "cpuset":  # takes nobody before it is told of processors
                continue
            inner = hierarchy / PARENT / group / "inner"
            inner.mkdir(parents=True)
            (inner / "cgroup.procs").write_text(str(orphan.pid))
        code, owned, _ = leaks(up)
        assert code == 1
        assert {"mount", "control group"} <= set(owned)
        assert leaks(up, "--clear") == (0, {}, 0)
        assert orphan.wait(20) == -signal.SIGKILL
    finally:
        orphan.kill()
        orphan.wait()
        end_cgroup(group)
        unmount_tree(folder)


def test_trials_and_models_left_unfinished_are_found_and_cleared(up: Any) -> None:
    (up.state / "models").unlink()
    (up.state / "models/.adding-x").mkdir(parents=True)
    (up.state / "doctor-x").mkdir()
    code, owned, orphaned = leaks(up)
    assert (code, orphaned) == (1, 2)
    assert owned["trial folder"]["name"] == str(up.state / "doctor-x")
    assert owned["unfinished part of models"]["name"].endswith(".adding-x")
    assert leaks(up, "--clear") == (0, {}, 0)
    assert not Path(up.state / "doctor-x").exists()


@pytest.mark.root
def test_a_measurement_leaves_no_snapshot_in_the_users_store(up: Any, tools: object) -> None:
    with own_instance(up.state, "bench") as instance:
        instance.admin.deploy(up.obedient(), "app.toml")
        header = {"authorization": f"Bearer {instance.key}"}
        ask = urllib.request.Request(f"{instance.url}/obedient/", headers=header)
        urllib.request.urlopen(ask).close()
        capture = instance.admin.wait_for_capture("obedient", timeout_s=120)
        assert capture["state"] == "done", capture["reason"]
        assert snapshots_of(up) != []
    assert snapshots_of(up) == []


def snapshots_of(up: Any) -> list[Path]:
    return list((up.state / "store/tenants").glob("*/roots/*/obedient.*"))


# With threads: the kernel tells a child of the end of each of them, one by one.
_MEASUREMENT = """
import pathlib, sys, threading, time, urllib.request
from nagara.cli.instance import own_instance
for _ in range(8):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
with own_instance(pathlib.Path(sys.argv[1]), "bench") as instance:
    instance.admin.deploy(sys.argv[2], "app.toml")
    header = {"authorization": f"Bearer {instance.key}"}
    urllib.request.urlopen(urllib.request.Request(instance.url + "/obedient/", headers=header))
    print("up", flush=True)
    time.sleep(600)
"""
_ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"authorization": f"Bearer {sys.argv[2]}"})
urllib.request.urlopen(request)
"""
