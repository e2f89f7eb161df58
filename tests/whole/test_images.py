"""An app of an image, from its deployment to its end, as its user sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nagara.control.errors import ControlError
from nagara.node.leftovers import file_daemons

pytestmark = pytest.mark.root


@pytest.fixture
def image(tmp_path: Path) -> str:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    return f"venv:{venv}"


def answers(up: Any) -> bool:
    """The agent is there for control."""
    try:
        up.admin.status()
    except ControlError:
        return False
    return True


def with_image(text: str, image: str) -> str:
    return text.replace('image = "host"', f"image = {json.dumps(image)}")


def test_an_app_of_an_image_is_deployed_saved_restored_and_deleted(
    up: Any, tools: object, image: str
) -> None:
    up.begin()
    text = with_image(up.obedient(), image)
    up.deploy(text)
    key = up.admin.add_key("test")
    first = up.get("/obedient/canary", key=key)
    assert up.admin.wait_for_capture("obedient", timeout_s=60)["state"] == "done"
    assert up.admin.fold("obedient") >= 1
    second = up.get("/obedient/canary", key=key)
    assert second[:2] == first[:2]
    restored, plain = up.admin.trace("obedient")["starts"][:2]
    assert (restored["kind"], restored["files"]["way"]) == ("restored", "local")
    assert (plain["kind"], plain["files"]["way"]) == ("plain", "lazy")
    assert 0 < plain["files"]["read_bytes"] < plain["files"]["size_bytes"]
    up.deploy(text)  # the same tree: its replica and its snapshot stay
    assert up.get("/obedient/canary", key=key)[2]["x-nagara-replica"] == restored["replica"]

    listed = up.run("image", "ls", "--json")
    assert "app.obedient." in listed.stdout
    assert up.run("delete", "obedient").returncode == 0
    assert "app.obedient." not in up.run("image", "ls", "--json").stdout


def test_an_image_that_is_not_there_is_named_and_nothing_is_deployed(up: Any) -> None:
    up.begin()
    file = up.state / "app.toml"
    file.write_text(with_image(up.obedient(), "venv:/nowhere/.venv"))
    refused = up.run("deploy", str(file))
    assert refused.returncode == 2
    assert "venv:/nowhere/.venv" in refused.stderr
    assert "is no virtual environment" in refused.stderr
    assert up.admin.apps() == []


def test_a_killed_agent_and_a_killed_file_daemon_cost_no_replica(up: Any, image: str) -> None:
    up.begin()
    up.deploy(with_image(up.obedient(snapshot=False), image))
    key = up.admin.add_key("test")
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    (daemon,) = file_daemons(up.state / "files")
    (agent,) = up.agents()
    os.kill(agent, signal.SIGKILL)
    os.kill(daemon, signal.SIGKILL)
    while "took over replica" not in up.log() or not answers(up):
        time.sleep(0.02)
    status, body, headers = up.get("/obedient/", key=key)
    assert (status, body, headers["x-nagara-replica"]) == (200, b"ready", before)
    while not file_daemons(up.state / "files"):  # the new agent sees to a new one
        time.sleep(0.02)
