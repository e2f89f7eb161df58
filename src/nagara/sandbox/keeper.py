"""The keeper: parent of the replicas of one machine. Standard library only.

It owns their output pipes (a replica whose pipe has no reader dies of its next line), collects
their exit codes and does nothing else, so it need not be restarted when everything around it is.
Agent and control come and go and are told what happened meanwhile.

One thread, one selector. Requests are lines of JSON over a Unix socket, each answered by one
line; only the keeper's own user may connect:

    {"op": "launch", "id", "argv", "env", "cwd", "log", "pid_file", "kernel_facts"}
                                     → {"pid"} or {"error", "exit_code"}
    {"op": "list"}                   → {"children": [...]}
    {"op": "signal", "id", "signal"} → {}
    {"op": "forget", "id"}           → {}   (only of ended ones)
    {"op": "drain", "id"}            → {}   (what it has written until now is in its log)
    {"op": "watch"}                  → {}, then a line per child that has ended or ends
    {"op": "hold", "name"}, with a descriptor  → {}   (in place of an earlier one)
    {"op": "held", "name"}           → {"is_held"}, with the descriptor
    {"op": "release", "name"}        → {}
    {"op": "lease", "id", "lease": {"slot", "epoch", "end_s"}}
                                     → {"ended": [...]}   (refused if its epoch is old)
    {"op": "unlease", "id"}          → {}   (the replica is gone)
    {"op": "renew", "renewals": [{"slot", "epoch", "mark_s", "ttl_s"}]}
                                     → {"mark_s", "refused": [...]}
    {"op": "fence", "slot", "epoch"} → {"ended": [...]}
    {"op": "shutdown"}               → {}   (refused while one runs)

With `pid_file` the command is one that creates a container and ends (`runc run --detach`): the
container's first process is then found in that file and has become our child, because the
keeper is a subreaper. Without it the command itself is the replica. With `kernel_facts`, a file,
it is a restore that sees these (see `kernel_facts`).

`launch` may carry the replica's `lease` as well. What runs under a lease is killed when its time
(of the boot-time clock; null: no end) is over or its slot is fenced, whoever else is alive.

A command has a session of its own. When a replica or a failed launcher ends, what is left of its
session is killed before its pid can be given away; when the keeper ends, the commands end too.

Descriptors (of `/dev/fuse`) are held for daemons that may die: the mount they belong to lives as
long as somebody has one. They come and go as ancillary data of the line.
"""

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from nagara.base.linux import become_subreaper, die_with_parent
from nagara.sandbox.fault_points import reach
from nagara.sandbox.keeper_log import ChildLog
from nagara.sandbox.kept_leases import KeptLeases
from nagara.sandbox.kernel_facts import see_kernel_facts
from nagara.sandbox.unix_socket import listen, peer_uid

_REQUEST_LIMIT = 4 << 20
_READ_BYTES = 65536
_DESCRIPTORS_AT_ONCE = 4


class Child:
    """One replica: the process, its output and what became of it."""

    def __init__(self, name: str, log: ChildLog, output: int, pid_file: Path | None) -> None:
        self.name = name
        self.log = log
        self.output = output  # reading end of the pipe; -1 once closed
        self.pid_file = pid_file
        self.launcher: Popen[bytes] | None = None
        self.pid: int | None = None  # None until the launcher has ended
        self.exit_code: int | None = None
        self.asker: Peer | None = None  # who waits for the launch

    def describe(self) -> dict[str, Any]:
        return {"id": self.name, "pid": self.pid, "exit_code": self.exit_code}


class Peer:
    """One connection: bytes read so far, bytes not yet written."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.outgoing = bytearray()
        self.is_watching = False
        self.received_descriptors: list[int] = []
        self.outgoing_descriptor: int | None = None  # goes with the next byte; kept by the keeper

    def close(self) -> None:
        self.connection.close()
        for descriptor in self.received_descriptors:
            os.close(descriptor)

    def answer(self, message: dict[str, Any]) -> None:
        self.outgoing += json.dumps(message).encode() + b"\n"


class RefusedError(Exception):
    """A request that cannot be done; its text is the answer."""


class Keeper:
    """The keeper's state and loop. Used from one thread."""

    def __init__(self, server: socket.socket, leases: KeptLeases) -> None:
        self._server = server
        self._leases = leases
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._peers: set[Peer] = set()
        self._strangers: dict[int, int] = {}  # exit codes of processes not yet known by pid
        self._held: dict[str, int] = {}  # descriptors kept for others
        self._is_ending = False

    def run(self) -> None:
        """Serves until a shutdown is asked for."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        # Handlers that do nothing: what is *ignored* would be ignored in the replicas as well.
        for passed in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(passed, lambda *_: None)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: self._reap(wake_read))
        while not self._is_ending:
            events_now = self._selector.select(self._leases.pause_s())
            self._end_all(self._leases.expire())
            for key, events in events_now:
                try:
                    if isinstance(key.data, Peer):
                        self._serve(key.data, events)
                    else:
                        key.data()
                except Exception:  # noqa: BLE001 - whatever it is, the replicas need their keeper
                    traceback.print_exc()
        self._server.close()
        for peer in list(self._peers):  # the last answers; who does not read them misses them
            self._serve(peer, 0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # also no descriptor left: others must go on
            connection, _ = self._server.accept()
            if peer_uid(connection) != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            peer = Peer(connection)
            self._peers.add(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(peer)
            self._flush(peer)
        except OSError:
            self._drop(peer)

    def _receive(self, peer: Peer) -> None:
        data, descriptors, *_ = socket.recv_fds(peer.connection, _READ_BYTES, _DESCRIPTORS_AT_ONCE)
        peer.received_descriptors += descriptors
        peer.received += data
        if not data or len(peer.received) > _REQUEST_LIMIT:
            raise ConnectionResetError
        while (end := peer.received.find(b"\n")) >= 0:
            line = bytes(peer.received[:end])
            del peer.received[: end + 1]
            try:
                self._handle(peer, json.loads(line))
            except (
                RefusedError,
                OSError,
                KeyError,
                TypeError,
                ValueError,
                RecursionError,
            ) as error:
                peer.answer({"error": f"{type(error).__name__}: {error}"})

    def _flush(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        if peer.outgoing:
            with contextlib.suppress(BlockingIOError):
                if peer.outgoing_descriptor is None:
                    sent = peer.connection.send(peer.outgoing)
                else:
                    passed = [peer.outgoing_descriptor]
                    sent = socket.send_fds(peer.connection, [bytes(peer.outgoing)], passed)
                    peer.outgoing_descriptor = None
                del peer.outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        self._selector.modify(peer.connection, wanted, peer)

    def _drop(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._selector.unregister(peer.connection)
            peer.close()

    def _handle(self, peer: Peer, request: dict[str, Any]) -> None:
        operation = request["op"]
        if operation == "launch":
            self._launch(peer, request)
            return
        answer: dict[str, Any] = {}
        if operation == "list":
            answer["children"] = [child.describe() for child in self._children.values()]
        elif operation == "signal":
            self._signal(request["id"], int(request["signal"]))
        elif operation == "forget":
            self._forget(request["id"])
        elif operation == "drain":
            if (written := self._children.get(request["id"])) is not None:
                self._drain(written)
        elif operation == "watch":
            peer.is_watching = True
            peer.answer(answer)
            for child in self._children.values():
                if child.exit_code is not None:
                    peer.answer({"exited": child.describe()})
            return
        elif operation in ("hold", "held", "release"):
            answer |= self._keep_descriptor(peer, operation, str(request["name"]))
        elif operation in ("lease", "unlease", "renew", "fence"):
            answer |= self._lease(operation, request)
        elif operation == "shutdown":
            if any(child.exit_code is None for child in self._children.values()):
                raise RefusedError("replicas are still running")
            if self._held:
                raise RefusedError("descriptors are still held")
            self._is_ending = True
        else:
            raise RefusedError(f"unknown operation {operation!r}")
        peer.answer(answer)

    def _lease(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        if operation == "renew":
            return self._leases.renew(request["renewals"])
        if operation == "unlease":
            self._leases.forget(request["id"])
            return {}
        if operation == "lease":
            return {"ended": self._begin_lease(request["id"], request["lease"])}
        ended = self._leases.fence(str(request["slot"]), int(request["epoch"]))
        self._end_all(ended)
        return {"ended": list(ended)}

    def _begin_lease(self, name: str, lease: dict[str, Any]) -> list[str]:
        ended = self._leases.begin(name, lease)
        if ended is None:
            raise RefusedError(
                f"the lease of {lease['slot']} is over, or another has followed it, "
                "or this machine runs replicas under another name"
            )
        self._end_all(ended)
        return list(ended)

    def _end_all(self, names: Iterable[str]) -> None:
        for name in names:
            sys.stderr.write(f"{name}: its lease is over\n")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._signal(name, signal.SIGKILL)

    def _keep_descriptor(self, peer: Peer, operation: str, name: str) -> dict[str, Any]:
        if operation == "held":
            peer.outgoing_descriptor = self._held.get(name)
            return {"is_held": name in self._held}
        if operation == "hold" and not peer.received_descriptors:
            raise RefusedError("no descriptor came with it")
        if name in self._held:
            os.close(self._held.pop(name))
        if operation == "hold":
            self._held[name] = peer.received_descriptors.pop()
        return {}

    def _launch(self, peer: Peer, request: dict[str, Any]) -> None:
        name = request["id"]
        if name in self._children and self._children[name].exit_code is None:
            raise RefusedError(f"{name} is already running")
        if request.get("lease"):
            self._begin_lease(name, request["lease"])
        self._close(self._children.pop(name, None))
        pid_file = Path(request["pid_file"]) if request.get("pid_file") else None
        facts = request.get("kernel_facts")
        reach("keeper.asked")
        log = ChildLog(Path(request["log"]))
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        child = Child(name, log, reading, pid_file)
        try:
            child.launcher = Popen(
                request["argv"],
                env=request.get("env"),
                cwd=request.get("cwd"),
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=lambda: _become_launcher(facts),  # this process has one thread
            )
        except OSError:
            os.close(reading)
            log.close()
            raise
        finally:
            os.close(writing)
        self._children[name] = child
        reach("keeper.spawned")
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._drain(child))
        if pid_file is None:
            child.pid = child.launcher.pid
            peer.answer({"pid": child.pid})
        else:
            child.asker = peer

    def _signal(self, name: str, number: int) -> None:
        child = self._children.get(name)
        if child is None or child.exit_code is not None:
            return
        # A child is reaped only by this thread, so its pid cannot have been given away.
        if child.launcher is not None:  # with whatever it has started: the checkpoint tool
            os.killpg(child.launcher.pid, number)
        elif child.pid is not None:
            os.kill(child.pid, number)

    def _forget(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and child.exit_code is None:
            raise RefusedError(f"{name} is still running")
        self._close(self._children.pop(name, None))
        reach("keeper.forgotten")

    def _drain(self, child: Child) -> None:
        if child.output < 0:  # closed by an event that came together with this one
            return
        try:
            data = os.read(child.output, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            child.log.write(data)
        else:
            self._close_output(child)

    def _close_output(self, child: Child) -> None:
        if child.output >= 0:
            self._selector.unregister(child.output)
            os.close(child.output)
            child.output = -1

    def _close(self, child: Child | None) -> None:
        if child is not None:
            self._close_output(child)
            child.log.close()

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(wake, 4096):
                pass
        while (ended := _next_ended()) is not None:
            self._end_session_of(ended)
            _, status = os.waitpid(ended.si_pid, 0)
            self._ended(ended.si_pid, os.waitstatus_to_exitcode(status))
        for peer in list(self._peers):
            self._serve(peer, 0)

    def _end_session_of(self, ended: os.waitid_result) -> None:
        """Kills what an ended, not yet reaped command has left: workers, a checkpoint tool."""
        has_succeeded = (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        for child in self._children.values():
            if child.launcher is None or child.launcher.pid != ended.si_pid:
                continue
            if child.pid_file is None or not has_succeeded:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended.si_pid, signal.SIGKILL)

    def _ended(self, pid: int, exit_code: int) -> None:
        for child in self._children.values():
            if child.launcher is not None and child.launcher.pid == pid:
                child.launcher.returncode = exit_code
                child.launcher = None
                if child.pid_file is None:
                    self._exited(child, exit_code)
                else:
                    self._launched(child, child.pid_file, exit_code)
                return
            if child.pid == pid:
                self._exited(child, exit_code)
                return
        # Either the first process of a container whose launcher has not ended yet, or an orphan
        # of some replica; only the former is asked for, and soon.
        self._strangers[pid] = exit_code
        while len(self._strangers) > 1024:
            self._strangers.pop(next(iter(self._strangers)))

    def _launched(self, child: Child, pid_file: Path, exit_code: int) -> None:
        reach("keeper.launched")
        answer: dict[str, Any]
        try:
            child.pid = int(pid_file.read_text()) if exit_code == 0 else None
        except (OSError, ValueError):
            child.pid = None
        if child.pid is None:
            answer = {"error": "the container was not created", "exit_code": exit_code}
            self._exited(child, exit_code or 1)
        else:
            answer = {"pid": child.pid}
            if self._leases.is_over(child.name):  # while its launcher was on its way
                self._end_all((child.name,))
            if child.pid in self._strangers:
                self._exited(child, self._strangers.pop(child.pid))
        if child.asker is not None and child.asker in self._peers:
            child.asker.answer(answer)
        child.asker = None

    def _exited(self, child: Child, exit_code: int) -> None:
        reach("keeper.ended")
        child.exit_code = exit_code
        if child.output >= 0:
            self._drain(child)
        for peer in self._peers:
            if peer.is_watching:
                peer.answer({"exited": child.describe()})


def _become_launcher(kernel_facts: str | None) -> None:
    die_with_parent(signal.SIGKILL)
    if kernel_facts:
        with contextlib.suppress(OSError):  # the tool finds out itself
            see_kernel_facts(Path(kernel_facts))


def _next_ended() -> os.waitid_result | None:
    """A child that has ended, left as a zombie: its pid still is its own."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def main() -> None:
    """`python -m nagara.sandbox.keeper SOCKET`: serves until told to end.

    The kernel drops the lock when its holder ends, so a second keeper ends at once and a
    successor of one that was killed does not.
    """
    path = Path(sys.argv[1])
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if os.fork():  # the lock goes along; whoever starts a keeper is not its parent
        os._exit(0)
    become_subreaper()
    with contextlib.suppress(OSError):  # only root may lower it; others live with the default
        Path("/proc/self/oom_score_adj").write_text("-900")
    Keeper(listen(path), KeptLeases(path.with_suffix(".epochs"))).run()
    path.unlink(missing_ok=True)  # the lock is still held: it is not a successor's


if __name__ == "__main__":
    main()
