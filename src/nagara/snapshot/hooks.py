"""What an app does before it is saved and after it is put back. Standard library only.

An app registers functions with the decorators `before_snapshot` and `after_restore` and calls
`listen` once, after its heavy imports. Outside nagara `listen` does nothing, so the calls can
stay in the code. Every process of the app that has called it, and every one forked from such a
process, has a thread that the node talks to over a Unix socket of its own inside the container:

    {"do": "before_snapshot"}                     → {"ok": true}
    {"do": "after_restore", "replica", "env"}     → {"ok": true}   or {"ok": false, "error"}

After a restore the environment is brought up to date and every random generator gets fresh
entropy *before* the app's own functions run: clones of one memory would otherwise draw the same
numbers.

The file stands alone: copied under any name into a server that has no nagara, it does the same.
"""

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import logging
import os
import random
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

SOCKET_VARIABLE = "NAGARA_HOOK_SOCKET"
_REQUEST_LIMIT = 1 << 20

_log = logging.getLogger(__name__)
Hook = TypeVar("Hook", bound=Callable[[], object])
_before: list[Callable[[], object]] = []
_after: list[Callable[[], object]] = []
_listening: set[int] = set()  # pids; a fork inherits its parent's, but not its thread


def before_snapshot(function: Hook) -> Hook:
    """Registers a function to run before the process is saved."""
    _before.append(function)
    return function


def after_restore(function: Hook) -> Hook:
    """Registers a function to run in each process put back, before it serves."""
    _after.append(function)
    return function


def listen() -> bool:
    """Starts listening for the node; False when this process is not a replica of nagara's.

    Processes forked from now on listen as well. May be called again.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return False
    if not _listening:
        os.register_at_fork(after_in_child=_listen_in_child)
    if os.getpid() not in _listening:
        _listening.add(os.getpid())
        server = _listener(path)
        threading.Thread(target=_serve, args=(server,), name="nagara-hooks", daemon=True).start()
    return True


def _listen_in_child() -> None:
    try:
        listen()
    except OSError as error:  # a child that gave up the rights to the folder goes on without
        _log.warning("this process has no snapshot hooks: %s", error)


def _listener(path: str) -> socket.socket:
    """A listening socket at the first free name: nobody else's is ever taken away."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for number in itertools.count():
        own = f"{path}.{os.getpid()}.{number}"
        try:
            server.bind(own)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            server.close()
            raise
        break
    Path(own).chmod(0o600)
    server.listen(4)
    return server


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
            line = connection.makefile("rb").readline(_REQUEST_LIMIT)
            connection.sendall(json.dumps(_handle(line)).encode() + b"\n")


def _handle(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if request["do"] == "before_snapshot":
            _prepare()
        elif request["do"] == "after_restore":
            _renew(request)
        else:
            return {"ok": False, "error": f"unknown request {request['do']!r}"}
    except Exception as error:  # noqa: BLE001 - an app's own function may raise anything
        _log.exception("a snapshot hook failed")
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"ok": True}


def _prepare() -> None:
    for function in _before:
        function()
    gc.collect()
    gc.freeze()  # later collections need not touch, and so copy, the saved pages
    with contextlib.suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _renew(request: dict[str, Any]) -> None:
    os.environ.update(request.get("env", {}))
    os.environ["NAGARA_REPLICA"] = request["replica"]
    reseed()
    for function in _after:
        function()


def reseed() -> None:
    """Gives every random generator of this process fresh entropy from the kernel."""
    random.seed(os.urandom(32))
    ssl.RAND_add(os.urandom(32), 32.0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(list(os.urandom(32)))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(8), "little"))
