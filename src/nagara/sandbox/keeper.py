"""The keeper: parent of the replicas of one machine. Standard library only.

It owns their output pipes (a replica whose pipe has no reader dies of its next line), collects
their exit codes and does nothing else, so it need not be restarted when everything around it is.
Agent and control come and go and are told what happened meanwhile.

One thread, one selector. Requests are lines of JSON over a Unix socket, each answered by one
line; only the keeper's own user may connect:

    {"op": "launch", "id", "argv", "env", "log", "pid_file"}   → {"pid"} or {"error", "exit_code"}
    {"op": "list"}                                             → {"children": [...]}
    {"op": "signal", "id", "signal"}                           → {}
    {"op": "forget", "id"}                                     → {}   (only of ended ones)
    {"op": "watch"}                                            → {} and then a line per exit
    {"op": "hold", "name"} with a descriptor                   → {}   (in place of an earlier one)
    {"op": "held", "name"}                                     → {"is_held"} with the descriptor
    {"op": "release", "name"}                                  → {}
    {"op": "shutdown"}                                         → {}   (refused while one runs)

With `pid_file` the command is one that creates a container and ends (`runc run --detach`): the
container's first process is then found in that file and has become our child, because the
keeper is a subreaper. Without it the command itself is the replica.

Descriptors (of `/dev/fuse`) are held for daemons that may die: the mount they belong to lives as
long as somebody has one. They come and go as ancillary data of the line.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from nagara.base.linux import become_subreaper
from nagara.sandbox.keeper_log import ChildLog
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

    def __init__(self, server: socket.socket) -> None:
        self._server = server
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
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: self._reap(wake_read))
        while not (self._is_ending and not any(peer.outgoing for peer in self._peers)):
            for key, events in self._selector.select():
                if isinstance(key.data, Peer):
                    self._serve(key.data, events)
                else:
                    key.data()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
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
            except (RefusedError, OSError, KeyError, TypeError, ValueError) as error:
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
        elif operation == "watch":
            peer.is_watching = True
        elif operation in ("hold", "held", "release"):
            answer |= self._keep_descriptor(peer, operation, str(request["name"]))
        elif operation == "shutdown":
            if any(child.exit_code is None for child in self._children.values()):
                raise RefusedError("replicas are still running")
            self._is_ending = True
        else:
            raise RefusedError(f"unknown operation {operation!r}")
        peer.answer(answer)

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
        self._close(self._children.pop(name, None))
        pid_file = Path(request["pid_file"]) if request.get("pid_file") else None
        log = ChildLog(Path(request["log"]))
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        child = Child(name, log, reading, pid_file)
        try:
            child.launcher = Popen(
                request["argv"],
                env=request.get("env"),
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError:
            os.close(reading)
            log.close()
            raise
        finally:
            os.close(writing)
        self._children[name] = child
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

    def _drain(self, child: Child) -> None:
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._ended(pid, os.waitstatus_to_exitcode(status))
        for peer in list(self._peers):
            self._serve(peer, 0)

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
            if child.pid in self._strangers:
                self._exited(child, self._strangers.pop(child.pid))
        if child.asker is not None and child.asker in self._peers:
            child.asker.answer(answer)
        child.asker = None

    def _exited(self, child: Child, exit_code: int) -> None:
        child.exit_code = exit_code
        if child.output >= 0:
            self._drain(child)
        for peer in self._peers:
            if peer.is_watching:
                peer.answer({"exited": child.describe()})


def main() -> None:
    """`python -m nagara.sandbox.keeper SOCKET`: serves until told to end."""
    become_subreaper()
    with contextlib.suppress(OSError):  # only root may lower it; others live with the default
        Path("/proc/self/oom_score_adj").write_text("-900")
    Keeper(listen(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
