"""`nagara exec` in a real replica: a container as root, else a plain process."""

import subprocess
from typing import Any

import pytest


def test_a_command_runs_inside_with_its_streams_and_exit_code(up: Any) -> None:
    up.begin()
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    _, _, headers = up.get("/obedient/", key=key)
    replica = headers["x-nagara-replica"]
    script = "read line; echo heard $line; echo gone wrong >&2; exit 7"
    done = subprocess.run(
        up.command("exec", replica, "--", "sh", "-c", script),
        input="you\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "heard you\n"), done.stderr
    assert done.stderr.endswith("gone wrong\n")

    unknown = up.run("exec", "other", "true")
    assert unknown.returncode == 2
    assert replica in unknown.stderr


def test_what_a_command_writes_is_the_replicas_alone(up: Any) -> None:
    up.begin()
    if up.admin.status()["isolation"] != "container":
        pytest.skip("needs containers: a plain process writes where its user may")
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    _, _, headers = up.get("/obedient/", key=key)
    replica = headers["x-nagara-replica"]
    written = up.run("exec", replica, "sh", "-c", "echo x > /srv/of-the-replica; hostname")
    assert written.returncode == 0, written.stderr
    assert up.run("exec", "obedient", "cat", "/srv/of-the-replica").stdout == "x\n"
    assert subprocess.run(["test", "-e", "/srv/of-the-replica"], check=False).returncode == 1
