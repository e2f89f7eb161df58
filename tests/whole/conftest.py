"""The `nagara` command as its users run it: real processes on a state folder of their own."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nagara.control.client import CONTROL_FILE, ControlClient, connect
from nagara.image.mounts import unmount_tree
from nagara.node.leftovers import owned_by

OBEDIENT = (Path(__file__).parent.parent / "apps/obedient.py").read_text()
WAIT_S = 120  # a busy machine


class Up:
    """A `nagara up` and the commands used with it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        return [
            sys.executable,
            "-P",
            "-m",
            "nagara.cli.main",
            "--state",
            str(self.state),
            *arguments,
        ]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A sub-command, to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=False,
        )

    def begin(self, *arguments: str) -> None:
        """Brings nagara up and returns when it serves."""
        log = (self.state / "up.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.command("up", "--port", "0", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: (self.state / CONTROL_FILE).exists() or self._has_ended())
        assert not self._has_ended(), self.log()

    def _has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def log(self) -> str:
        return (self.state / "up.log").read_text()

    def deploy(self, text: str) -> None:
        """Deploys an app file's text by the command."""
        file = self.state / "app.toml"
        file.write_text(text)
        done = self.run("deploy", str(file))
        assert done.returncode == 0, done.stderr

    @staticmethod
    def obedient(name: str = "obedient", *, snapshot: bool = True) -> str:
        """An app file with the little test server."""
        canary = 'snapshot = {canary = {path = "/canary"}}' if snapshot else "snapshot = false"
        lines = [
            f"[app.{name}]",
            'image = "host"',
            f"command = {json.dumps(['python', '-S', '-c', OBEDIENT])}",
            'env = {LISTEN = "${PORT}"}',
            'ready = "/"',
            canary,
        ]
        return "\n".join(lines) + "\n"

    def agents(self) -> list[int]:
        """Pids of the node agents that this `nagara up` has started."""
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children if "agent" in Path(f"/proc/{c}/cmdline").read_text()]

    @property
    def admin(self) -> ControlClient:
        return connect(self.state)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it by a signal and returns its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            (self.state / CONTROL_FILE).unlink(missing_ok=True)
        code = self.process.wait(WAIT_S)
        self.process = None
        return code

    def get(self, path: str, *, key: str | None) -> tuple[int, bytes, Any]:
        """(status, body, headers) of a request to the gateway."""
        request = urllib.request.Request(self.admin.url + path)
        if key:
            request.add_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers


def wait_for(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; pytest's time-out bounds it."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def up(tmp_path: Path, state_dir: Path) -> Iterator[Up]:
    """Nothing runs yet. At the end nothing of it may be left on the machine."""
    state = tmp_path / "state"
    state.mkdir()
    for shared in ("models", "tools"):
        if (state_dir / shared).exists():
            (state / shared).symlink_to((state_dir / shared).resolve())
    machine = Up(state)
    try:
        yield machine
        if machine.process is not None:
            assert machine.end() == 0, machine.log()
        assert owned_by(state) == [], machine.log()
    finally:
        if machine.process is not None:
            machine.process.kill()
            machine.process.wait()
        if owned_by(state):  # only after a failure: leave the machine to others
            machine.run("doctor", "--leaks", "--clear")
        if os.geteuid() == 0:
            unmount_tree(state)
