"""The examples, run as their users would."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nagara.image.models import ModelFolder
from nagara.sandbox.tools import Tools

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_pool_is_planned_from_a_list_of_prices(up: Any) -> None:
    file = str(EXAMPLES / "plan_from_prices" / "pool.toml")
    done = up.run("pool", "plan", "--file", file, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    launches = dict(plan["launches"])
    assert launches, plan
    assert not any("ohio" in name and "h100" in name for name in launches if plan["shortages"])
    words = up.run("pool", "explain", "--file", file).stdout
    assert "per device and hour" in words


def test_an_agent_has_twenty_generations_from_zero(up: Any, smollm2: ModelFolder) -> None:
    up.begin("--slots", "2")
    text = (
        (EXAMPLES / "smollm2.toml")
        .read_text()
        .replace("max = 4, concurrency = 8", "max = 2, concurrency = 10")
    )
    up.deploy(text)
    key = up.admin.add_key("agent")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "agent.py"), up.admin.url, "smollm2", "20"],
        capture_output=True, text=True, timeout=170, check=False,
        env={**os.environ, "NAGARA_KEY": key},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *thoughts, said = done.stdout.splitlines()
    assert len(thoughts) == 20
    found = re.fullmatch(
        r"20 generations in [\d.]+ s by (\d) replicas; (\d+) waited for a start", said
    )
    assert found is not None, said
    assert int(found[1]) in (1, 2)
    assert int(found[2]) > 0


@pytest.mark.root
def test_a_server_with_hooks_is_restored_and_its_hooks_have_run(up: Any, tools: Tools) -> None:
    pytest.importorskip("fastapi", reason="needs the packages fastapi and uvicorn")
    folder = EXAMPLES / "fastapi_torch"
    text = (folder / "nagara.toml").read_text()
    # Replicas do not see the folder that tests run in: the server's file goes into their own layer.
    command = re.search(r"^command = \[.*?\]$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    argv = [part.replace("/srv/fastapi_torch", "/srv/app") for part in json.loads(command[0][10:])]
    argv[0] = "python"
    script = 'mkdir -p /srv/app && printf %s "$0" >/srv/app/app.py && exec "$@"'
    shell = ["sh", "-c", script, (folder / "app.py").read_text(), *argv]
    up.begin()
    up.deploy(text.replace(command[0], f"command = {json.dumps(shell)}"))
    key = up.admin.add_key("test")

    def ask(path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{up.admin.url}/scores{path}", data, headers)
        with urllib.request.urlopen(request, timeout=170) as answer:
            document: dict[str, Any] = json.loads(answer.read())
        return document

    features = {"values": [1.0, 2.0, 3.0]}
    before = ask("/predict", features)
    assert ask("/who")["calls"] == {"before": 0, "after": 0}
    capture = up.admin.wait_for_capture("scores", timeout_s=170)
    assert capture["state"] == "done", capture
    up.admin.fold("scores")
    assert ask("/predict", features) == before
    who = ask("/who")
    assert who["calls"] == {"before": 1, "after": 1}
    starts = up.admin.trace("scores")["starts"]
    assert [start["kind"] for start in starts[:1]] == ["restored"]
    assert starts[0]["replica"] == who["replica"]
