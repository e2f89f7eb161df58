"""Faults that a user meets at the command line: each ends in words that name it and help on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nagara.base.linux import MS_RDONLY, mount
from nagara.control.app_secrets import AppSecrets
from nagara.image.mounts import unmount_if_mounted

from .conftest import wait_for


def put_program(folder: Path, name: str, says: str) -> None:
    """A program of that name that only says its version, first on this process's PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)


def is_plain(text: str) -> bool:
    """Whether it is words for people, not a trace."""
    return "Traceback" not in text and text.count("\n") <= 8


def test_a_value_of_the_wrong_type_names_its_key_and_deploys_nothing(up: Any) -> None:
    up.begin()
    file = up.state / "app.toml"
    file.write_text(up.obedient(snapshot=False) + 'port = "eight thousand"\n')
    done = up.run("deploy", str(file))
    assert done.returncode == 2
    assert f"{file}: 1 problem" in done.stderr
    assert "app.obedient.port: input should be a valid integer" in done.stderr
    assert is_plain(done.stderr)
    assert up.admin.apps() == []


def test_a_model_that_is_not_there_is_named_with_the_way_to_add_it(up: Any) -> None:
    up.begin()
    file = up.state / "app.toml"
    file.write_text(up.obedient(snapshot=False) + 'models = ["nowhere"]\n')
    done = up.run("deploy", str(file))
    assert done.returncode == 2
    assert "no model named 'nowhere'" in done.stderr
    assert "nagara models add" in done.stderr
    assert is_plain(done.stderr)
    assert up.admin.apps() == []


def app(command: list[str], *more: str) -> str:
    return "\n".join(
        [
            "[app.broken]",
            'image = "host"',
            "snapshot = false",
            f"command = {json.dumps(command)}",
            *more,
            "",
        ]
    )


def test_a_command_that_ends_at_once_is_answered_with_its_last_words(up: Any) -> None:
    up.begin()
    up.deploy(app(["sh", "-c", "echo the licence has expired >&2; exit 7"]))
    key = up.admin.add_key("test")
    status, body, _ = up.get("/broken/", key=key)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (503, "start_failed")
    assert "exit code 7" in error["message"]
    assert "the licence has expired" in error["message"]
    assert "the licence has expired" in up.run("apps").stdout
    assert "the licence has expired" in up.run("logs", "broken").stdout


def test_a_command_that_never_gets_ready_is_answered_within_its_time(up: Any) -> None:
    up.begin()
    up.deploy(app(["sleep", "1000"], 'ready = "/up"', 'timeouts = {start = "300ms"}'))
    key = up.admin.add_key("test")
    status, body, _ = up.get("/broken/", key=key)
    assert (status, json.loads(body)["error"]["code"]) == (503, "start_failed")
    assert "/up was not answered with a 2xx" in json.loads(body)["error"]["message"]


CHANGING = "import itertools; n = itertools.count(); canary = lambda: str(next(n))"


@pytest.mark.root
def test_an_app_that_cannot_be_judged_by_its_canary_goes_on_plainly_and_says_why(
    up: Any, tools: object
) -> None:
    up.begin()
    text = up.obedient().replace('"${PORT}"', f'"${{PORT}}", FIRST = {json.dumps(CHANGING)}')
    up.deploy(text)
    key = up.admin.add_key("test")
    assert up.get("/obedient/", key=key)[0] == 200
    assert up.admin.wait_for_capture("obedient", timeout_s=60)["state"] == "off"
    shown = up.run("apps").stdout
    assert "the canary gives another answer each time" in shown
    up.admin.fold("obedient")
    assert up.get("/obedient/", key=key)[0] == 200
    assert up.admin.trace("obedient")["starts"][0]["kind"] == "plain"


@pytest.mark.root
def test_a_state_folder_that_cannot_be_written_is_said_in_words(up: Any) -> None:
    folder = up.state / "sealed"
    folder.mkdir()
    mount("tmpfs", folder, "tmpfs", MS_RDONLY)
    try:
        up.state = folder
        done = up.run("up", "--port", "0")
    finally:
        unmount_if_mounted(folder)
    assert done.returncode == 1
    assert str(folder) in done.stderr
    assert "read-only" in done.stderr.lower()
    assert "hint: " in done.stderr
    assert is_plain(done.stderr), done.stderr


@pytest.mark.root
@pytest.mark.parametrize(
    ("says", "words"),
    [("runc version 1.0.3", "is 1.0.3"), ("segmentation fault", "none found")],
)
def test_a_runc_that_is_too_old_or_broken_means_plain_processes_and_is_said(
    up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, words: str
) -> None:
    put_program(tmp_path / "bin", "runc", says)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    up.begin()
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    assert up.get("/obedient/", key=key)[0] == 200
    facts = up.admin.status()
    assert (facts["isolation"], facts["can_snapshot"]) == ("process", False)
    (gap,) = [gap for gap in facts["missing"] if gap.startswith("runc")]
    assert words in gap
    assert "`nagara setup runc` gets it" in gap
    assert gap in up.log()


@pytest.mark.root
def test_a_criu_that_is_too_old_means_plain_starts_and_is_said(
    up: Any, tools: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(tmp_path / "bin", "criu", "Version: 3.17.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (up.state / "tools").unlink()
    up.begin()
    up.deploy(up.obedient())
    key = up.admin.add_key("test")
    assert up.get("/obedient/", key=key)[0] == 200
    facts = up.admin.status()
    assert (facts["isolation"], facts["can_snapshot"]) == ("container", False)
    assert facts["missing"] == [
        f"criu >= 4.2 ({tmp_path}/bin/criu is 3.17.1); `nagara setup criu` gets it"
    ]
    up.admin.fold("obedient")
    assert up.get("/obedient/", key=key)[0] == 200
    wait_for(lambda: up.admin.trace("obedient")["starts"][0]["kind"] == "plain")


@pytest.mark.root
def test_an_app_that_needs_its_secret_to_get_ready_has_no_snapshot_and_is_told_the_way(
    up: Any, tools: object
) -> None:
    up.begin()
    text = up.obedient().replace('"${PORT}"', '"${PORT}", FIRST = "os.environ[\'TOKEN\']"')
    up.deploy(text + 'secrets = ["TOKEN"]\n')
    key = up.admin.add_key("test")
    status, body, _ = up.get("/obedient/", key=key)
    assert (status, "its secret TOKEN is not set" in body.decode()) == (503, True)
    AppSecrets(up.state).put("default", "TOKEN", "value")
    wait_for(lambda: up.get("/obedient/", key=key)[0] == 200)
    assert up.admin.wait_for_capture("obedient", timeout_s=120)["state"] == "off"
    shown = up.run("apps").stdout
    assert 'snapshot.secrets = "allow"' in shown
    allowed = text.replace("snapshot = {", 'snapshot = {secrets = "allow", ')
    up.deploy(allowed + 'secrets = ["TOKEN"]\n')
    assert up.get("/obedient/", key=key)[0] == 200
    assert up.admin.wait_for_capture("obedient", timeout_s=120)["state"] == "done"
