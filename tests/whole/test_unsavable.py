"""A server that cannot be saved serves on by plain starts, and says why wherever one looks."""

import json
from pathlib import Path
from typing import Any

import pytest

APP = (Path(__file__).parent.parent / "apps/obedient.py").read_text()
WATCHING = """
import ctypes
watch = ctypes.CDLL(None).inotify_init1(0)
assert ctypes.CDLL(None).inotify_add_watch(watch, b"/srv", 0x100) >= 0
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_server_that_cannot_be_saved_says_why_and_is_not_tried_again_and_again(
    up: Any, tools: object
) -> None:
    up.begin()
    lines = [
        "[app.watching]",
        'image = "host"',
        f"command = {json.dumps(['python3', '-S', '-c', APP])}",
        f'env = {{LISTEN = "${{PORT}}", FIRST = {json.dumps(WATCHING)}}}',
        'ready = "/"',
    ]
    up.deploy("\n".join(lines) + "\n")
    key = up.admin.add_key("test")
    assert up.get("/watching/", key=key)[:2] == (200, b"ready")
    capture = up.admin.wait_for_capture("watching", timeout_s=120)
    assert (capture["state"], capture["failures"]) == ("off", 2)
    assert "watches files of its root with inotify" in capture["reason"]
    for _ in range(2):
        up.admin.fold("watching")
        assert up.get("/watching/", key=key)[:2] == (200, b"ready")
    assert {start["kind"] for start in up.admin.trace("watching")["starts"]} == {"plain"}
    assert up.log().count("making a snapshot") == 2
    for command in (("snapshot", "ls"), ("apps",)):
        assert "inotify" in up.run(*command).stdout
    (shown,) = json.loads(up.run("snapshot", "show", "watching").stdout)
    assert shown["state"] == "none, 2 failures"
    assert "hint: switch off watching" in shown["reasons"][0]
    assert "(inotify)" in up.log()
