"""The daemon behind the lazy data layer: a process of its own, one per tenant and machine.

    requests of the kernel  → `FuseChannel` → `ObjectFiles` → store
    requests of the mounter → control socket, a line of JSON each:

    {"op": "ping"}                                     → {"pid"}
    {"op": "record", "name", "list"}                   → {}
    {"op": "recorded", "name"}                         → {"touches": [[object, chunk], ...]}
    {"op": "prefetch", "name", "trace", "list", "distance_s"}
                                                       → {}    begins; `progress` tells
    {"op": "fill", "name", "list", "index", "at_leisure"}
                                                       → {}    fetches all in the order of files
    {"op": "gather", "name", "wanted": {"objects", "excerpts"}, "distance_s"}
                                                       → {}    begins; who asks waits for it:
    {"op": "gathered", "name", "limit_s"}              → {"progress": {...}}
    {"op": "progress", "name"}                         → {"progress": {...}}
    {"op": "forget", "name"}                           → {}    its holder is gone
    {"op": "stats"}                                    → {"tiers": [...]}
    {"op": "stop"}                                     → {}

Only the daemon's own user may connect (the socket's folder is private, its mode 0600).
"""

import contextlib
import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nagara.base.errors import NagaraError
from nagara.image.fuse_channel import FuseChannel, Handler
from nagara.image.index_reader import read_index
from nagara.image.lazy_layer import socket_address
from nagara.image.object_files import ObjectFiles, node_of
from nagara.image.prefetch import Prefetcher
from nagara.image.recorder import Recorder
from nagara.image.trace import Trace, parse_touches, read_trace, within
from nagara.image.tree import Node, walk
from nagara.image.tree_files import TreeFiles
from nagara.store.documents import parse_json
from nagara.store.errors import StoreError
from nagara.store.names import ObjectName, parse_name
from nagara.store.roots import read_list
from nagara.store.store import Store

_log = logging.getLogger(__name__)
_LINE_LIMIT = 16 << 20  # what is to be gathered has a line of its own for each large library
_PAUSE_S = 0.1


class LazyDaemon:
    """Everything in the daemon's process.

    Args:
        store: the tenant's.
        control: a listening Unix socket.
        time_limit_s: of one request of the kernel.
        tree: shown as a whole instead of the tenant's objects.
    """

    def __init__(
        self,
        store: Store,
        control: socket.socket,
        *,
        time_limit_s: float = 60.0,
        tree: Node | None = None,
    ) -> None:
        self._store = store
        self._control = control
        self._time_limit_s = time_limit_s
        self._recorder = Recorder()
        self._prefetcher = Prefetcher(store)
        self._files: Handler = (
            ObjectFiles(store, self._known_names, self._recorder)
            if tree is None
            else TreeFiles(store, tree)
        )

    def run(self, descriptor: int, *, is_takeover: bool) -> None:
        """Serves until the mount is gone. `descriptor` is that of `/dev/fuse`.

        Raises OSError (EINVAL) when this kernel cannot hand requests over to a new daemon.
        """
        protect_from_oom()
        raise_descriptor_limit()
        threading.Thread(target=self._accept, name="control", daemon=True).start()
        channel = FuseChannel(descriptor, self._files, time_limit_s=self._time_limit_s)
        if isinstance(self._files, ObjectFiles) and not is_takeover:
            self._files.excerpts.begin(
                lambda name, start, data: channel.store(node_of(name), start, data)
            )
        channel.run(is_takeover=is_takeover)

    def _known_names(self) -> Iterator[ObjectName]:
        """What the mounted images of this tenant may ask for."""
        local = self._store.local
        for pin in local.folder.ledger.pins():
            if pin.tenant == local.tenant:
                with contextlib.suppress(StoreError):
                    yield from read_list(self._store, parse_name(pin.list))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._control.accept()
            except OSError as error:  # without descriptors or memory, for the moment
                _log.warning("a question could not be accepted: %s", error.strerror)
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline(_LINE_LIMIT):
                try:
                    answer = self._answer(parse_json(line))
                except (NagaraError, ValueError, KeyError, TypeError) as error:
                    answer = {"error": f"{error}" or type(error).__name__}
                try:
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:
                    return

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request["op"]
        if operation == "ping":
            return {"pid": os.getpid()}
        if operation == "record":
            wanted = read_list(self._store, parse_name(request["list"]))
            self._recorder.start(request["name"], wanted)
        elif operation == "recorded":
            touches = self._recorder.finish(request["name"]) or []
            return {"touches": [[str(name), chunk] for name, chunk in touches]}
        elif operation == "prefetch":
            self._prefetch(request)
        elif operation == "gather":
            self._gather(request)
        elif operation == "gathered":
            progress = self._prefetcher.gathered(request["name"], float(request["limit_s"]))
            return {"progress": asdict(progress)}
        elif operation == "fill":
            self._fill(request)
        elif operation == "progress":
            return {"progress": asdict(self._prefetcher.progress(request["name"]))}
        elif operation == "forget":
            self._recorder.finish(request["name"])
            self._prefetcher.forget(request["name"])
            if isinstance(self._files, ObjectFiles):
                self._files.excerpts.forget(request["name"])
        elif operation == "stats":
            return {"tiers": [asdict(report) for report in self._store.reports()]}
        elif operation == "stop":
            threading.Timer(0.05, os._exit, (0,)).start()
        else:
            raise ValueError(f"unknown operation {operation!r}")
        return {}

    def _prefetch(self, request: dict[str, Any]) -> None:
        trace, listing = parse_name(request["trace"]), parse_name(request["list"])

        def load() -> Trace:
            listed = frozenset(read_list(self._store, listing))
            return within(read_trace(self._store.read(trace)), listed)

        self._prefetcher.start_trace(request["name"], load, _distance_s(request))

    def _gather(self, request: dict[str, Any]) -> None:
        wanted = parse_touches(request["wanted"])
        if wanted.excerpts is not None and isinstance(self._files, ObjectFiles):
            self._files.excerpts.add(request["name"], wanted.excerpts)
        self._prefetcher.start_gather(request["name"], wanted, _distance_s(request))

    def _fill(self, request: dict[str, Any]) -> None:
        tree = read_index(self._store.read(parse_name(request["index"])))
        order = [node.content for _, node in walk(tree) if node.content is not None]
        quiet_s = None
        if request.get("at_leisure") and isinstance(self._files, ObjectFiles):
            quiet_s = self._files.quiet_s
        self._prefetcher.start_fill(request["name"], parse_name(request["list"]), order, quiet_s)


def _distance_s(request: dict[str, Any]) -> float | None:
    far = request.get("distance_s")
    return float(far) if isinstance(far, int | float) else None


def listen_on(path: Path) -> socket.socket:
    """A control socket at `path`, for its owner only."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    with socket_address(path) as address:
        server.bind(address)
    path.chmod(0o600)
    server.listen(64)
    return server


def protect_from_oom() -> None:
    """Replicas wait for this process: another one goes first when memory ends."""
    with contextlib.suppress(OSError):  # only root may lower it
        Path("/proc/self/oom_score_adj").write_text("-900")


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
