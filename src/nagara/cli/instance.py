"""A nagara of one's own for a demonstration or a measurement, beside whatever runs already.

A child process `nagara up` on a free port with a state folder of its own below the user's one;
models, tools and the store are shared by links. Everything is gone when the context ends.
"""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nagara.base.errors import NagaraError
from nagara.base.folder_lock import only_holder
from nagara.control.client import CONTROL_FILE, ControlClient, connect
from nagara.image.mounts import mount_points

INSTANCE_LOCK = "instance.lock"  # held for as long as the folder is in use
_START_S = 90.0
_END_S = 60.0
_ANSWER_S = 3100.0  # more than a start may take that compiles


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed chat answer."""

    text: str
    first_token_s: float  # from the request's sending
    total_s: float
    replica: str
    cold_start_ms: float


@dataclass(frozen=True, slots=True)
class Instance:
    """A running nagara: its admin API, its address, and how to ask an app."""

    admin: ControlClient
    url: str
    key: str
    state: Path
    log: Path

    def chat(self, app: str, model: str, question: str, *, max_tokens: int) -> Reply:
        """A greedy streamed chat request to an app that serves `model`.

        Raises:
            NagaraError: the answer is an error, or stops in the middle.
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
        }
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=_ANSWER_S
        )
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        sent_s = time.perf_counter()
        try:
            connection.request("POST", f"/{app}/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise NagaraError(f"{response.status}: {response.read(2000).decode()}", where=app)
            return _read_reply(response, sent_s)
        except (OSError, http.client.HTTPException) as error:
            raise NagaraError(f"no answer: {error!r}", where=app) from error
        finally:
            connection.close()

    def last_start(self, app: str) -> dict[str, Any]:
        """The waterfall of the app's latest start."""
        start: dict[str, Any] = self.admin.trace(app)["starts"][0]
        return start


def _read_reply(response: http.client.HTTPResponse, sent_s: float) -> Reply:
    first_token_s = None
    parts: list[str] = []
    finished = False
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            finished = True
        elif data and line.startswith(b"data: "):
            for choice in json.loads(data)["choices"]:
                if content := choice["delta"].get("content"):
                    first_token_s = first_token_s or time.perf_counter() - sent_s
                    parts.append(content)
    if not finished or first_token_s is None:
        raise NagaraError(f"the answer stopped in the middle, after {''.join(parts)!r}")
    return Reply(
        text="".join(parts),
        first_token_s=first_token_s,
        total_s=time.perf_counter() - sent_s,
        replica=response.headers.get("x-nagara-replica", ""),
        cold_start_ms=float(response.headers.get("x-nagara-cold-start-ms", 0)),
    )


@contextmanager
def own_instance(state: Path, purpose: str, *, slots: int | None = None) -> Iterator[Instance]:
    """Brings nagara up for a while.

    Args:
        state: the user's state folder, whose models and tools are used.
        purpose: part of the temporary folder's name.
        slots: how many replicas may run; None leaves it to `nagara up`.

    Raises:
        NagaraError: it does not come up; with what it said.
    """
    state.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=state))
    with ExitStack() as held:
        held.enter_context(_termination_unwinds())
        held.callback(_remove, own)
        held.enter_context(only_holder(own, INSTANCE_LOCK, "it is another process's"))
        (state / "store").mkdir(mode=0o700, exist_ok=True)  # what is imported once stays
        for shared in ("models", "tools", "store"):
            (own / shared).symlink_to(state / shared)
        log = own / "up.log"
        command = [
            sys.executable,
            "-P",  # else the current folder counts as a part of nagara's environment
            "-m",
            "nagara.cli.main",
            "--state",
            str(own),
            "up",
            "--port",
            "0",
            "--end-with-parent",
            *(() if slots is None else ("--slots", str(slots))),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            instance = _until_up(process, own, log)
            try:
                yield instance
            finally:
                _forget_apps(instance)
        finally:
            _end(process)


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """SIGTERM meanwhile leaves by an exception, as Ctrl-C does, so that everything is undone."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _forget_apps(instance: Instance) -> None:
    """Takes away the apps that have snapshots, which would stay in the user's store."""
    with suppress(NagaraError):  # it has ended, or is past helping
        for app in instance.admin.apps():
            if app["capture"]["state"] == "done":
                instance.admin.delete(app["name"])


def instance_folders(state: Path) -> list[Path]:
    """Folders of instances, running or left by a killed process, below a user's state folder."""
    return sorted(lock.parent for lock in state.glob(f"*-*/{INSTANCE_LOCK}"))


def _remove(own: Path) -> None:
    """Deletes the folder, but never through something that is still mounted in it."""
    if left := mount_points(own):
        raise NagaraError("is still mounted; the folder was not deleted", where=str(left[0].target))
    shutil.rmtree(own)


def _until_up(process: subprocess.Popen[bytes], own: Path, log: Path) -> Instance:
    deadline_s = time.monotonic() + _START_S
    while not (own / CONTROL_FILE).exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = log.read_text(errors="replace")[-2000:]
            raise NagaraError(f"nagara did not come up; it said:\n{said}")
        time.sleep(0.05)
    admin = connect(own)
    return Instance(admin, admin.url, admin.add_key("instance"), own, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise NagaraError("nagara did not end in time and was killed") from None
