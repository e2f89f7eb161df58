"""A whole image as one FUSE file system: where overlay has no data-only layers (before 6.5).

Metadata comes from the index in memory, contents from the store as in the lazy data layer. The
same tree, owners, attributes and link counts; slower, since the kernel asks for every name once.
Node ids are positions in the index, so a new daemon goes on where the old one died. Called from
the channel's threads.
"""

import errno
import itertools
import stat

from nagara.image import fuse_wire as wire
from nagara.image.fuse_channel import Answer, Later, answer_buffer
from nagara.image.object_files import OpenObjects, read_object
from nagara.image.tree import Node, walk
from nagara.store.store import Store


class TreeFiles:
    """The handler for one tree."""

    def __init__(self, store: Store, root: Node) -> None:
        self._objects = OpenObjects(store)
        self._nodes: list[Node] = []  # by node id less one
        self._links: list[int] = []
        self._parents: list[int] = []
        self._number(root)

    def _number(self, root: Node) -> None:
        for _, node in walk(root):
            node.number = -1
        parents = {id(root): 1}
        for _, node in walk(root):
            if node.number < 0:
                node.number = len(self._nodes)
                self._nodes.append(node)
                self._links.append(2 if node.is_folder else 0)
                self._parents.append(parents.get(id(node), 1))
            if not node.is_folder:
                self._links[node.number] += 1
            for kid in (node.kids or {}).values():
                if kid.is_folder:
                    parents[id(kid)] = node.number + 1
                    self._links[node.number] += 1

    def handle(self, request: wire.Request, deadline_s: float) -> "Answer | Later | None":
        unique, operation = request.unique, request.operation
        node = self._node(request.node)
        if operation == wire.LOOKUP:
            kid = (node.kids or {}).get(wire.name_in(request))
            if kid is None:
                return wire.failure(unique, errno.ENOENT)
            return wire.entry(unique, self._attributes(kid))
        if operation == wire.GETATTR:
            return wire.attributes(unique, self._attributes(node))
        if operation == wire.READLINK:
            return wire.answer(unique, node.target or b"")
        if operation == wire.OPEN:
            return wire.opened(unique)
        if operation == wire.READ:
            return self._read(request, node, deadline_s)
        if operation == wire.OPENDIR:
            return wire.opened_folder(unique)
        if operation == wire.READDIR:
            return self._read_folder(request, node)
        if operation in (wire.GETXATTR, wire.LISTXATTR):
            return _xattr(request, node)
        if operation in (wire.RELEASE, wire.RELEASEDIR, wire.FLUSH, wire.DESTROY):
            return wire.answer(unique)
        if operation == wire.STATFS:
            return wire.statfs(unique, len(self._nodes), 0)
        return wire.failure(unique, errno.ENOSYS)

    def _node(self, number: int) -> Node:
        if not 1 <= number <= len(self._nodes):
            raise OSError(errno.ESTALE, "no such node")
        return self._nodes[number - 1]

    def _attributes(self, node: Node) -> wire.Attributes:
        size = len(node.target) if node.target is not None else node.size
        return wire.Attributes(
            node.number + 1, node.mode, size, self._links[node.number],
            node.uid, node.gid, node.rdev, node.mtime_ns,
        )  # fmt: skip

    def _read(self, request: wire.Request, node: Node, deadline_s: float) -> "Answer | Later":
        if node.content is not None:
            return read_object(self._objects, node.content, request, deadline_s)
        offset, length = wire.read_in(request)
        piece = (node.inline or b"")[offset : offset + length]
        whole, body = answer_buffer(request.unique, len(piece))
        body[:] = piece
        return whole

    def _read_folder(self, request: wire.Request, node: Node) -> Answer:
        """Entries in the order of their names; the offset is a position in it, so seeking works."""
        offset, length = wire.read_in(request)
        kids = node.kids or {}
        folder_mode = stat.S_IFDIR
        entries = itertools.chain(
            [(b".", node.number + 1, folder_mode)],
            [(b"..", self._parents[node.number], folder_mode)],
            ((name, kids[name].number + 1, kids[name].mode) for name in sorted(kids)),
        )
        found = bytearray()
        for place, (name, number, mode) in enumerate(entries):
            if place < offset:
                continue
            raw = wire.folder_entry(name, number, mode, place + 1)
            if len(found) + len(raw) > length:
                break
            found += raw
        return wire.answer(request.unique, bytes(found))


def _xattr(request: wire.Request, node: Node) -> Answer:
    room, wanted = wire.xattr_in(request)
    if request.operation == wire.LISTXATTR:
        value: bytes | None = b"".join(name + b"\0" for name, _ in node.xattrs)
    else:
        value = dict(node.xattrs).get(wanted)
    if value is None:
        return wire.failure(request.unique, errno.ENODATA)
    if room == 0:
        return wire.xattr_size(request.unique, len(value))
    if len(value) > room:
        return wire.failure(request.unique, errno.ERANGE)
    return wire.answer(request.unique, value)
