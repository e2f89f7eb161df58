"""Does checkpointing work on this machine? A small server is saved and put back, and must answer.

A version number does not say: a CRIU that starts may still be unable to save a listening socket
on a newer kernel. So a container like a replica's, with one small server in it, is made, told a
secret, saved, ended, restored from its memory alone, and asked for the secret.

Everything is made in a mount namespace of a thread's own and below one scratch folder; the
server ends by itself when nobody speaks to it for two minutes. Killed at any moment, this leaves an
empty control group and the scratch folder. Blocking, for about a second. Needs root.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.host import HostImage
from nagara.image.mounts import mount_overlay, unmount_tree
from nagara.image.probes import in_private_mounts
from nagara.sandbox.bundle import Bind, Bundle
from nagara.sandbox.cgroups import kill_cgroup, remove_cgroup, thaw_cgroup
from nagara.sandbox.leftovers import kill_tools_in
from nagara.sandbox.netns import NetworkNamespace
from nagara.sandbox.runc import Runc, RuncError, criu_complaint
from nagara.snapshot.capture import CRIU_CONFIG

CONTROL_GROUP = "self-test-"  # then the pid of the process that tests, and a random word
_PORT = 8000
_STEP_S = 60.0
_ANSWER_S = 20.0
_SERVER = f"""
import socket
server = socket.create_server(("127.0.0.1", {_PORT}))
server.settimeout(120)
kept = b""
while True:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        said = connection.recv(64)
        if said != b"?":
            kept = said
        connection.sendall(kept)
"""


class SelfTestError(NagaraError):
    """A process could not be saved and put back."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How the test went where it went well."""

    saved_in_s: float
    restored_in_s: float
    memory_bytes: int


def self_test(runc: Path, criu: Path, scratch: Path) -> SelfTest:
    """Saves and restores a small server with these tools, working below `scratch`.

    Raises:
        SelfTestError: with the tool's own reason.
    """
    try:
        return in_private_mounts(lambda: _Trial(runc, criu, scratch).run())
    except SelfTestError:
        raise
    except (NagaraError, OSError) as error:
        what = error.what if isinstance(error, NagaraError) else str(error)
        raise SelfTestError(what, where=str(criu)) from error


class _Trial:
    """The folders of one test and its steps. Belongs to the thread with the private mounts."""

    def __init__(self, runc: Path, criu: Path, scratch: Path) -> None:
        self._criu = criu
        self._base = scratch / "self-test"
        self._runc = Runc(runc, criu, self._base / "runc")
        self._python = _interpreter()
        needed = (Path(sys.base_prefix), self._python.parent)
        self._image = HostImage(state=self._base, needed=needed)
        self._group = f"{CONTROL_GROUP}{os.getpid()}-{secrets.token_hex(4)}"

    def run(self) -> SelfTest:
        for part in ("upper", "work", "root", "memory"):
            (self._base / part).mkdir(parents=True)
        (self._base / "criu.conf").write_text(CRIU_CONFIG)
        root, upper = self._base / "root", self._base / "upper"
        self._image.prepare_upper(upper)
        mount_overlay(self._image.layers, upper, self._base / "work", root)
        secret = secrets.token_hex(8).encode()
        try:
            with self._container("before") as (bundle, namespace):
                pid_file = bundle / "pid"
                command = self._runc.run_command("before", bundle, pid_file)
                self._launch(command, bundle, "the container could not be made")
                _until_answers(namespace, secret, secret)
                saved_in_s = self._save()
            with self._container("after") as (bundle, namespace):
                memory = self._base / "memory"
                command = self._runc.restore_command(
                    "after", bundle, bundle / "pid", memory, bundle
                )
                began_s = time.monotonic()
                self._launch(command, bundle, "the container could not be restored")
                restored_in_s = time.monotonic() - began_s
                _until_answers(namespace, b"?", secret)
        finally:
            unmount_tree(self._base)
        memory_bytes = sum(file.stat().st_size for file in memory.iterdir())
        return SelfTest(saved_in_s, restored_in_s, memory_bytes)

    @contextlib.contextmanager
    def _container(self, name: str) -> Iterator[tuple[Path, NetworkNamespace]]:
        """A bundle of that name and a namespace for it; nothing runs in them afterwards."""
        bundle = self._base / name
        bundle.mkdir()
        namespace = NetworkNamespace.create()
        group = f"{self._group}-{name}"
        try:
            Bundle(
                container=name,
                control_group=group,
                root=self._base / "root",
                command=(str(self._python), "-I", "-S", "-c", _SERVER),
                env={"PATH": os.defpath},
                network_namespace=namespace.path,
                binds=tuple(Bind(path, path) for path in self._image.bound_folders()),
                criu_config=self._base / "criu.conf",
            ).write(bundle)
            yield bundle, namespace
        finally:
            self._end(name, group, bundle)
            namespace.close()

    def _launch(self, command: list[str], bundle: Path, failure: str) -> None:
        # Pipes, as a replica has: a checkpoint carries no file of the machine's. The server
        # writes nothing, so that they need no reader once the launcher has ended.
        launcher = subprocess.Popen(
            command,
            cwd=bundle,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert launcher.stdout is not None
        with launcher.stdout:
            code = _ended(launcher)
            if code == 0:
                return
            os.set_blocking(launcher.stdout.fileno(), False)
            said = (launcher.stdout.read(4096) or b"").decode(errors="replace").strip()
        reason = criu_complaint(bundle / "restore.log") or said or f"exit code {code}"
        raise SelfTestError(f"{failure}: {reason[-300:]}", where=str(self._criu))

    def _save(self) -> float:
        began_s = time.monotonic()
        self._runc.pause("before")
        work = self._base / "before"
        self._runc.checkpoint("before", self._base / "memory", work, time_limit_s=_STEP_S)
        return time.monotonic() - began_s

    def _end(self, name: str, group: str, bundle: Path) -> None:
        """The order of a replica's end: processes, mounts, records, control groups."""
        for _ in range(500):
            left = kill_cgroup(group) + kill_tools_in(bundle)
            thaw_cgroup(group)
            if not left:
                break
            time.sleep(0.01)
        record = self._base / "runc" / name
        unmount_tree(record)
        if record.exists():
            with contextlib.suppress(RuncError):
                self._runc.delete(name)
        remove_cgroup(group)


def _interpreter() -> Path:
    """The one that an environment was made from: a copy of it in there has no library beside it."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _ended(launcher: "subprocess.Popen[bytes]") -> int:
    try:
        return launcher.wait(_STEP_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        return launcher.wait()


def _until_answers(namespace: NetworkNamespace, said: bytes, expected: bytes) -> None:
    """Raises `SelfTestError` unless the server soon answers `said` with `expected`."""
    deadline_s = time.monotonic() + _ANSWER_S
    answer = None
    while answer is None:
        try:
            with namespace.open_socket() as asking:
                asking.setblocking(True)
                asking.settimeout(_ANSWER_S)
                asking.connect(("127.0.0.1", _PORT))
                asking.sendall(said)
                answer = asking.recv(64)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise SelfTestError("the small server does not answer") from None
            time.sleep(0.005)
    if answer != expected:
        raise SelfTestError(f"the small server answered {answer!r} instead of {expected!r}")
