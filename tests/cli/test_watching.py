"""`nagara top`, `logs -f`, `init`, `exec`, exit codes, and what comes through a pipe."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from page_stand import PageStand, app_text, page_stand, until

from nagara.cli.main import main
from nagara.control.appfile import parse_apps

NAGARA = [sys.executable, "-P", "-m", "nagara.cli.main"]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[PageStand]:
    with page_stand(tmp_path / "state") as stand:
        yield stand


def nagara(state: Path, *arguments: str, **options: object) -> Result:
    return CliRunner().invoke(main, ["--state", str(state), *arguments], **options)  # type: ignore[arg-type]


def test_top_prints_once_where_no_terminal_is(stand: PageStand) -> None:
    stand.node.scripts["bad"].always_fails = "boom \x1b[31m"
    stand.deploy(app_text("smol"), app_text("bad"))
    assert stand.call("smol") == 200
    assert stand.call("bad") == 503
    shown = nagara(stand.folder, "top", env={"COLUMNS": "150"}).stdout
    assert "2 apps" in shown
    assert "smol" in shown
    assert "boom ␛[31m" in shown
    assert "\x1b" not in shown
    document = json.loads(nagara(stand.folder, "top", "--json").stdout)
    assert [app["name"] for app in document["apps"]] == ["smol", "bad"]


def _heed_interrupts() -> None:
    """As from a terminal: what a shell has started in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_top_is_live_on_a_terminal_and_ends_with_ctrl_c(stand: PageStand) -> None:
    stand.deploy(app_text("first"))
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(
        [*NAGARA, "--state", str(stand.folder), "top"],
        stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
        preexec_fn=_heed_interrupts,
    )  # fmt: skip
    os.close(child)
    said = b""

    def has(text: bytes) -> bool:
        nonlocal said
        while select.select([parent], [], [], 0)[0]:
            said += os.read(parent, 65536)
        return text in said

    def has_ended() -> bool:
        with contextlib.suppress(OSError):  # the other end is closed
            has(b"")  # or it could wait for somebody to read its last words
        return process.poll() is not None

    try:
        until(lambda: has(b"first"))
        stand.deploy(app_text("second"))
        until(lambda: has(b"second"))
        process.send_signal(signal.SIGINT)
        until(has_ended)
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_logs_are_followed_through_a_pipe(stand: PageStand) -> None:
    stand.deploy(app_text("smol"))
    assert stand.call("smol") == 200
    with subprocess.Popen(
        [*NAGARA, "--state", str(stand.folder), "logs", "smol", "-f"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "GET /health\n"
        assert stand.call("smol", "/echo/new") == 200
        assert process.stdout.readline() == "GET /echo/new\n"
        process.terminate()


def test_what_is_piped_has_no_colours(stand: PageStand) -> None:
    stand.deploy(app_text("smol"))
    assert stand.call("smol") == 200
    for command in (["apps"], ["trace", "smol"], ["pool", "status"], ["errors"]):
        done = subprocess.run(
            [*NAGARA, "--state", str(stand.folder), *command],
            capture_output=True, check=True, env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        assert done.stdout
        assert b"\x1b" not in done.stdout + done.stderr


def test_exit_codes_tell_the_kind(tmp_path: Path, stand: PageStand) -> None:
    assert nagara(tmp_path / "none", "apps").exit_code == 3
    assert nagara(stand.folder, "delete", "none").exit_code == 2
    (stand.folder / "admin.token").write_text("nga-wrong\n")
    assert nagara(stand.folder, "apps").exit_code == 4


def test_init_writes_a_file_that_can_be_deployed(tmp_path: Path, stand: PageStand) -> None:
    file = tmp_path / "new.toml"
    done = nagara(stand.folder, "init", str(file), "--name", "web", "--ready", "/",
                  "--command", "python3 -m http.server ${PORT}")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert f"nagara deploy {file}" in done.stdout
    (app,) = parse_apps(file.read_text(), str(file))
    assert (app.name, app.command[-1], app.ready) == ("web", "${PORT}", "/")
    assert nagara(stand.folder, "deploy", str(file)).exit_code == 0
    again = nagara(stand.folder, "init", str(file), "--name", "web", "--command", "x")
    assert again.exit_code == 2
    assert "--force" in again.stderr


def test_init_with_a_model_serves_it_with_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    done = nagara(tmp_path, "init", str(file), "--name", "chat", "--model", "smollm2")
    assert done.exit_code == 0, done.stderr
    (app,) = parse_apps(file.read_text(), str(file))
    assert app.models == ("smollm2",)
    assert app.command[:4] == ("nagara", "engine", "serve", "/models/smollm2")


def test_init_without_an_answer_names_the_flag(tmp_path: Path) -> None:
    done = nagara(tmp_path, "init", str(tmp_path / "x.toml"), "--name", "a")
    assert done.exit_code == 2
    assert "--command" in done.stderr


def test_init_asks_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "asked.toml"
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*NAGARA, "--state", str(tmp_path), "init", str(file)],
        stdin=child, stdout=child, stderr=child, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    os.write(parent, b"web\npython3 -m http.server ${PORT}\n\n")
    give_up_s = time.monotonic() + 60
    with process:
        while process.poll() is None and time.monotonic() < give_up_s:
            if select.select([parent], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # it has ended
                    os.read(parent, 65536)
        process.kill()
    os.close(parent)
    assert process.returncode == 0
    (app,) = parse_apps(file.read_text(), str(file))
    assert (app.name, app.image, app.command[0]) == ("web", "host", "python3")


def test_exec_of_an_unknown_replica_names_those_there(tmp_path: Path) -> None:
    done = nagara(tmp_path, "exec", "none", "true")
    assert done.exit_code == 2
    assert "none runs here" in done.stderr
