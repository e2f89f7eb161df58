"""The lazy data layer: a flat folder in which every object of a tenant lies by its name.

The kernel asks LOOKUP, OPEN and READ of it and nothing else. A name tells the size, so LOOKUP
needs no network; OPEN gets a small object, READ the chunks of a large one. Node ids are a pure
function of the name and nothing hangs on file handles: a new daemon goes on where the old one
died, and finds names it has not seen in the reference lists of the mounted images.

Called from the channel's threads.
"""

import errno
import logging
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from nagara.image import fuse_wire as wire
from nagara.image.excerpt_pages import ExcerptPages
from nagara.image.fuse_channel import Answer, Later, answer_buffer
from nagara.image.read_ahead import ReadAhead
from nagara.image.recorder import Recorder
from nagara.store.errors import BadNameError
from nagara.store.names import ObjectName, parse_name
from nagara.store.reader import Reader
from nagara.store.store import Store

_log = logging.getLogger(__name__)
_FOLDER = wire.Attributes(wire.ROOT, stat.S_IFDIR | 0o555, nlink=2)
_READERS_OPEN = 4096


class OpenObjects:
    """Readers of a store, kept open while they are used often. Called from any thread.

    A reader that falls out is closed when the last read with it has ended, not before: its
    descriptor's number must not be given to another file under a running read.
    """

    def __init__(self, store: Store, limit: int = _READERS_OPEN) -> None:
        self.store = store
        self._limit = limit
        self._lock = threading.Lock()
        self._readers: OrderedDict[ObjectName, Reader] = OrderedDict()

    def get(self, name: ObjectName) -> Reader | None:
        """A reader that is open already."""
        with self._lock:
            reader = self._readers.get(name)
            if reader is not None:
                self._readers.move_to_end(name)
            return reader

    def open(self, name: ObjectName, deadline_s: float) -> Reader:
        """May fetch. Raises `StoreError`."""
        reader = self.get(name)
        if reader is not None and not reader.is_outdated():
            return reader
        reader = self.store.open(name, deadline_s)
        self._keep(name, reader)
        return reader

    def open_here(self, name: ObjectName) -> bool:
        """Opens what needs no network; False when it is not here."""
        reader = self.store.open_here(name)
        if reader is None:
            return False
        self._keep(name, reader)
        return True

    def prepare(self, name: ObjectName, start: int, deadline_s: float) -> None:
        """Gets the chunk at `start` of a large object ready. Raises `StoreError`."""
        reader = self.open(name, deadline_s)
        if not reader.is_here(start, 1):
            reader.need(start, 1, deadline_s)

    def _keep(self, name: ObjectName, reader: Reader) -> None:
        with self._lock:
            self._readers[name] = reader
            while len(self._readers) > self._limit:
                self._readers.popitem(last=False)


def read_object(
    objects: OpenObjects, name: ObjectName, request: wire.Request, deadline_s: float
) -> "Answer | Later":
    """Answers a READ of an object: at once when its bytes are here."""
    offset, length = wire.read_in(request)
    length = max(0, min(length, name.size - offset))
    reader = objects.get(name)
    if reader is not None and reader.is_here(offset, length):
        return _read(reader, request.unique, offset, length, deadline_s)

    def later(deadline_s: float) -> Answer:
        reader = objects.open(name, deadline_s)
        return _read(reader, request.unique, offset, length, deadline_s)

    return later


def _read(reader: Reader, unique: int, offset: int, length: int, deadline_s: float) -> memoryview:
    whole, body = answer_buffer(unique, length)
    reader.read_into(body, offset, deadline_s)
    # The kernel caches these bytes on the mount's side: once is enough.
    reader.forget_cache(offset, length)
    return whole


class ObjectFiles:
    """The handler.

    Args:
        known: names that mounted images may have asked a previous daemon for.
        recorder: told what is touched.
    """

    def __init__(
        self,
        store: Store,
        known: Callable[[], Iterable[ObjectName]],
        recorder: Recorder | None = None,
    ) -> None:
        self._objects = OpenObjects(store)
        self._ahead = ReadAhead(self._objects.prepare)
        self._store = store
        self.excerpts = ExcerptPages(store)
        self._known = known
        self._recorder = recorder or Recorder()
        self._names: dict[int, ObjectName] = {}
        self._lock = threading.Lock()
        self._waited_s = time.monotonic()

    def quiet_s(self) -> float:
        """For how long nobody has had to wait for contents; at first, since the beginning."""
        return time.monotonic() - self._waited_s

    def handle(self, request: wire.Request, deadline_s: float) -> "Answer | Later | None":
        unique, operation = request.unique, request.operation
        if operation == wire.READ:
            name = self._name(request.node)
            answer = read_object(self._objects, name, request, deadline_s)
            if callable(answer):
                self._waited_s = time.monotonic()
            if name.is_chunked:
                offset, _ = wire.read_in(request)
                self._recorder.read(name, offset)
                self._ahead.read(name, offset, is_ready=not callable(answer))
            return answer
        if operation == wire.OPEN:
            opened = self._open(request)
            if callable(opened):
                self._waited_s = time.monotonic()
            return opened
        if operation == wire.LOOKUP:
            return self._lookup(request)
        if operation == wire.GETATTR:
            is_root = request.node == wire.ROOT
            found = _FOLDER if is_root else _attributes(self._name(request.node))
            return wire.attributes(unique, found)
        if operation == wire.OPENDIR:
            return wire.opened_folder(unique)
        if operation in (wire.READDIR, wire.RELEASE, wire.RELEASEDIR, wire.FLUSH, wire.DESTROY):
            return wire.answer(unique)
        if operation == wire.STATFS:
            return wire.statfs(unique, len(self._names), 0)
        return wire.failure(unique, errno.ENOSYS)

    def _lookup(self, request: wire.Request) -> Answer:
        try:
            name = parse_name(wire.name_in(request).decode("ascii"))
        except (BadNameError, UnicodeDecodeError):
            return wire.failure(request.unique, errno.ENOENT)
        node = node_of(name)
        with self._lock:
            if self._names.setdefault(node, name) != name:
                _log.error("%s and %s have the same node id", name, self._names[node])
                return wire.failure(request.unique, errno.EIO)
        return wire.entry(request.unique, _attributes(name))

    def _open(self, request: wire.Request) -> "Answer | Later":
        name = self._name(request.node)
        self._recorder.open(name)
        if self._objects.get(name) is not None or self.excerpts.is_given(name):
            return wire.opened(request.unique)
        if self.excerpts.has(name):

            def give(deadline_s: float) -> Answer:
                if not self.excerpts.give(name, deadline_s) and not name.is_chunked:
                    self._objects.open(name, deadline_s)
                return wire.opened(request.unique)

            return give
        if name.is_chunked:
            return wire.opened(request.unique)

        # Opening what is here takes no longer than handing it to another thread.
        if self._objects.open_here(name):
            return wire.opened(request.unique)

        def later(deadline_s: float) -> Answer:
            self._objects.open(name, deadline_s)
            return wire.opened(request.unique)

        return later

    def _name(self, node: int) -> ObjectName:
        name = self._names.get(node)
        if name is None:
            with self._lock:
                for known in self._known():
                    self._names.setdefault(node_of(known), known)
            name = self._names.get(node)
        if name is None:
            raise OSError(errno.ESTALE, "nobody knows this object")
        return name


def node_of(name: ObjectName) -> int:
    """The node id of an object: 63 bits of its digest, none of the reserved ones."""
    node = int.from_bytes(name.digest[:8], "big") >> 1
    return node if node > wire.ROOT else node + 2


def _attributes(name: ObjectName) -> wire.Attributes:
    return wire.Attributes(node_of(name), stat.S_IFREG | 0o444, name.size)
