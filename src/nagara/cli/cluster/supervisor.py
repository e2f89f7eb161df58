"""Sees to it that a machine which is lent to a pool runs an agent. On that machine, without Ray.

What the machine is lent as is a file of its state folder: it outlives whoever supervises, and the
engine itself. The agent is started so that it belongs to nobody: an engine that ends its workers
with all their children must not end an agent, and an agent that is there already is taken over.
One thread; methods may be called from any.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nagara.base.durable import write_durably
from nagara.base.errors import UsageError
from nagara.cli.agent_record import AgentRecord, running_agent
from nagara.node.network.address import split_address, tcp_address
from nagara.node.network.cluster_token import FILE_NAME

START_S = 60.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
_LOOK_EVERY_S, _CHECK_EVERY_S = 0.05, 0.5
_LOG_CHARS = 400

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lent:
    """What the machine is lent as.

    `port`: where the agent listens; 0: where it did before, or anywhere. `certificates`: a folder
    of this machine.
    """

    name: str
    port: int = 0
    certificates: str | None = None


class Supervisor:
    """The one of this machine.

    Args:
        state: the folder of its node.
        host: the address under which other machines reach it.
    """

    def __init__(self, state: Path, host: str) -> None:
        self._state = state
        self._host = host
        self._problem = ""
        self._changed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """`{"lent_as", "address", "version", "problem"}` as JSON."""
        lent, agent = self._lent(), running_agent(self._state)
        is_ours = lent is not None and agent is not None and bool(agent.address)
        return {
            "lent_as": "" if lent is None else lent.name,
            "address": agent.address if is_ours and agent is not None else "",
            "version": agent.version if agent is not None else "",
            "problem": "" if is_ours or lent is None else self._problem,
        }

    def lend(self, lent: Lent, token: str) -> bool:
        """From now on an agent runs; False: the machine is lent under another name."""
        present = self._lent()
        if present is not None and present.name != lent.name:
            return False
        folder = self._state / "node"
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._state / FILE_NAME, token.encode() + b"\n")
        write_durably(folder / "lent.json", json.dumps(asdict(lent)).encode())
        self._problem = ""
        self._changed.set()
        return True

    def take_back(self) -> None:
        """From now on no agent runs. Replicas end with their leases."""
        with contextlib.suppress(FileNotFoundError):
            (self._state / "node" / "lent.json").unlink()
            if (agent := running_agent(self._state)) is not None:
                _end(agent)
        self._changed.set()

    def close(self) -> None:
        """Supervises no more; the agent goes on."""
        self._is_over = True
        self._changed.set()
        self._thread.join()

    def _lent(self) -> Lent | None:
        try:
            return Lent(**json.loads((self._state / "node" / "lent.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _supervise(self) -> None:
        pause_s = _PAUSE_S
        while not self._is_over:
            lent = self._lent()
            if lent is None:
                self._until_changed()
                continue
            agent = running_agent(self._state)
            if agent is None:
                agent = self._started(lent)
            if agent is None:
                self._until_changed(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _PAUSE_S
            if not agent.address:
                self._problem = "an agent that does not serve other machines runs here already"
            self._until_it_ends(agent)

    def _until_changed(self, limit_s: float | None = None) -> None:
        self._changed.wait(limit_s)
        self._changed.clear()  # what it stands for is looked at after this

    def _started(self, lent: Lent) -> AgentRecord | None:
        """The agent, once it listens; None with the reason noted."""
        log = self._state / "node" / "agent.log"
        port = lent.port or self._last_port()
        command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(self._state)]
        command += ["agent", "--listen", tcp_address(self._host, port).removeprefix("tcp://")]
        command += ["--token-file", str(self._state / FILE_NAME)]
        if lent.certificates is not None:
            command += ["--certificates", lent.certificates]
        with log.open("wb") as said:
            pid = _start_as_orphan(command, said.fileno())
        if pid is None or (agent := self._listening(pid)) is None:
            end = log.read_text(errors="replace").strip()[-_LOG_CHARS:]
            self._problem = f"its agent does not start: {end or 'it says nothing'}"
            _log.error("%s", self._problem)
            if port != lent.port:
                self._forget_port()  # somebody else has it now
            return None
        write_durably(self._state / "node" / "agent.port", agent.address.encode())
        return agent

    def _listening(self, pid: int) -> AgentRecord | None:
        """The agent's record, as soon as there is one; None when it ends before, or takes long."""
        with _watched(pid) as has_ended:
            for _ in range(int(START_S / _LOOK_EVERY_S)):
                agent = running_agent(self._state)
                if agent is not None and agent.pid == pid:
                    return agent
                if has_ended(_LOOK_EVERY_S):
                    return None
        return None

    def _until_it_ends(self, agent: AgentRecord) -> None:
        with _watched(agent.pid) as has_ended:
            while not self._is_over and not has_ended(_CHECK_EVERY_S):
                if self._lent() is None:
                    _end(agent)

    def _last_port(self) -> int:
        """Where the previous agent listened: then nobody has to be told of the new one."""
        try:
            host, port = split_address((self._state / "node" / "agent.port").read_text())
        except (OSError, UsageError):
            return 0
        return port if host == self._host else 0

    def _forget_port(self) -> None:
        (self._state / "node" / "agent.port").unlink(missing_ok=True)


def _start_as_orphan(command: list[str], output: int) -> int | None:
    """Starts a process whose parent has ended already; its number."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=2,"
        " start_new_session=True)\n"
        "print(child.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code, *command],
        stdout=subprocess.PIPE, stderr=output, env=_environment(), check=False,
    )  # fmt: skip
    return int(done.stdout) if done.returncode == 0 else None


def _environment() -> dict[str, str]:
    """This process's, without what Ray sets for its own workers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    if not kept.get("CUDA_VISIBLE_DEVICES", "all"):
        del kept["CUDA_VISIBLE_DEVICES"]  # hides all devices from a worker that claims none
    if kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    return kept


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds for the process's end: whether it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield lambda _: True
        return
    try:
        yield lambda wait_s: bool(select.select([descriptor], [], [], wait_s)[0])
    finally:
        os.close(descriptor)


def _end(agent: AgentRecord) -> None:
    with contextlib.suppress(OSError):
        os.kill(agent.pid, signal.SIGTERM)
