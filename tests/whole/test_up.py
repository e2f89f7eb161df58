import json
import os
import pwd
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest


def test_an_app_is_deployed_called_listed_traced_and_deleted(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    status, body, headers = up.get("/obedient/", key=key)
    assert (status, body) == (200, b"ready")
    replica = headers["x-nagara-replica"]
    assert float(headers["x-nagara-cold-start-ms"]) > 0
    assert "obedient" in up.run("apps").stdout
    assert "serving" in up.run("logs", "obedient").stdout
    trace = json.loads(up.run("trace", replica, "--json").stdout)
    (start,) = trace["starts"]
    assert set(start["stages"]) == {
        "acquire", "files", "host", "device", "canary", "unaccounted",
    }  # fmt: skip
    assert sum(start["stages"].values()) == pytest.approx(start["total_s"], rel=0.01)
    assert up.run("trace", "obedient").returncode == 0
    assert up.run("delete", "obedient").returncode == 0
    assert up.get("/obedient/", key=key)[0] == 404


def test_without_a_key_nothing_is_answered_and_nothing_is_started(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient())
    for key in (None, "ngk-wrong"):
        status, body, _ = up.get("/obedient/", key=key)
        assert status == 401
        assert "error" in json.loads(body)
    assert up.admin.trace("obedient")["starts"] == []


def test_the_app_file_given_to_up_is_deployed(up: Any) -> None:
    file = up.state / "app.toml"
    file.write_text(up.obedient("given"))
    up.begin(str(file))
    assert [app["name"] for app in up.admin.apps()] == ["given"]


def test_a_wrong_app_file_names_file_and_key_and_nothing_comes_up(up: Any) -> None:
    file = up.state / "app.toml"
    file.write_text(up.obedient().replace("image =", "imgae ="))
    done = up.run("up", "--port", "0", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "imgae" in done.stderr


def test_a_second_up_on_the_same_state_is_refused_and_the_first_goes_on(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    up.get("/obedient/", key=key)
    done = up.run("up", "--port", "0")
    assert done.returncode != 0
    assert str(up.state) in done.stderr
    assert up.get("/obedient/", key=key)[0] == 200


def test_a_port_in_use_is_said(up: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = up.run("up", "--port", port)
    assert done.returncode != 0
    assert port in done.stderr


def test_control_that_is_killed_leaves_its_replica_serving_and_the_next_takes_it_over(
    up: Any,
) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    (agent,) = up.agents()
    up.end(signal.SIGKILL)
    while Path(f"/proc/{agent}").exists():  # it ends with its parent, in its own time
        time.sleep(0.02)
    up.begin()
    status, _, headers = up.get("/obedient/", key=key)
    assert (status, headers["x-nagara-replica"]) == (200, before)


def test_an_agent_that_is_killed_is_started_again_and_its_replica_goes_on(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    (agent,) = up.agents()
    os.kill(agent, signal.SIGKILL)
    while "took over replica" not in up.log():
        time.sleep(0.02)
    status, _, headers = up.get("/obedient/", key=key)
    assert (status, headers["x-nagara-replica"]) == (200, before)


@pytest.mark.root
def test_a_replica_is_folded_restored_and_answers_the_same(up: Any, tools: object) -> None:
    up.begin()
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    first = up.get("/obedient/canary", key=key)
    assert up.admin.wait_for_capture("obedient", timeout_s=60)["state"] == "done"
    assert up.admin.fold("obedient") >= 1
    second = up.get("/obedient/canary", key=key)
    assert second[:2] == first[:2]
    newest = up.admin.trace("obedient")["starts"][0]
    assert newest["kind"] == "restored"
    assert newest["replica"] == second[2]["x-nagara-replica"]


def test_replicas_stay_when_asked_to(up: Any) -> None:
    up.begin("--keep-replicas")
    up.deploy(up.obedient(snapshot=False))
    key = up.admin.add_key("test")
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    assert up.end() == 0
    up.begin()
    assert up.get("/obedient/", key=key)[2]["x-nagara-replica"] == before


@pytest.mark.root
def test_as_another_user_control_serves_and_the_agent_ends_with_it(up: Any) -> None:
    for folder in (up.state, *up.state.parents):
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)  # pytest's own are closed to everybody else
    up.begin("--user", "nobody")
    up.deploy(up.obedient(snapshot=False))
    assert up.get("/obedient/", key=up.admin.add_key("test"))[0] == 200
    status = Path(f"/proc/{up.process.pid}/status").read_text()
    assert f"Uid:\t{pwd.getpwnam('nobody').pw_uid}\t" in status
    (agent,) = up.agents()
    assert up.end(signal.SIGINT) == 0
    assert not Path(f"/proc/{agent}").exists()
