"""A folder of this machine as a tree: everything lstat and the attributes say, contents stored.

Nothing is opened before lstat has said that it is a regular file, links are not followed, and
every kind of file is either kept as it is or named in an error. Blocking.
"""

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError, UnrepresentableError
from nagara.image.tree import Node, Xattrs, check_node, printable

# Overlay's notes to itself in an upper layer: they name inodes of the layers at hand.
PRIVATE_MARKS = (b"trusted.overlay.origin", b"trusted.overlay.impure", b"trusted.overlay.uuid")
_LAYER_REFUSES = (b"trusted.overlay.metacopy", b"trusted.overlay.redirect")
_KEPT = (b"user.", b"trusted.", b"security.", b"system.posix_acl_")


def import_folder(
    source: Path,
    writer: ContentWriter,
    *,
    is_layer: bool = False,
    leave_out: Collection[bytes] = (),
) -> Node:
    """The tree in a folder.

    Args:
        is_layer: it is an upper layer of overlay: whiteouts and opaque marks are kept as marks,
            overlay's private notes are dropped.
        leave_out: paths below the folder that are passed over, without a `/` at either end.

    Raises:
        SourceError: something cannot be read, or changed meanwhile.
        UnrepresentableError: names what no image can hold.
    """
    walk = _Walk(os.fsencode(source), writer, is_layer=is_layer, leave_out=frozenset(leave_out))
    return walk.run()


class _Walk:
    def __init__(
        self, source: bytes, writer: ContentWriter, *, is_layer: bool, leave_out: frozenset[bytes]
    ) -> None:
        self._source = source
        self._writer = writer
        self._is_layer = is_layer
        self._leave_out = leave_out
        self._linked: dict[tuple[int, int], Node] = {}  # files with several names

    def run(self) -> Node:
        try:
            root = self._node(self._source, os.lstat(self._source), b"")
            if not root.is_folder:
                raise SourceError("is no folder", where=os.fsdecode(self._source))
            pending = [(b"", root)]
            while pending:
                path, folder = pending.pop()
                pending += self._fill(path, folder)
        except OSError as error:
            where = os.fsdecode(error.filename or self._source)
            raise SourceError(f"cannot be read: {error.strerror}", where=where) from error
        return root

    def _fill(self, path: bytes, folder: Node) -> list[tuple[bytes, Node]]:
        """Puts the entries of a folder into its node; returns the folders among them."""
        assert folder.kids is not None
        found = []
        here = self._source + b"/" + path if path else self._source
        for name in os.listdir(here):  # noqa: PTH208 - a Path cannot hold bytes
            inner = path + b"/" + name if path else name
            if inner in self._leave_out:
                continue
            full = here + b"/" + name
            kid = self._node(full, os.lstat(full), inner)
            folder.kids[name] = kid
            if kid.is_folder:
                found.append((inner, kid))
        return found

    def _node(self, full: bytes, state: os.stat_result, path: bytes) -> Node:
        kind = stat.S_IFMT(state.st_mode)
        key = (state.st_dev, state.st_ino)
        is_linked = state.st_nlink > 1 and kind != stat.S_IFDIR
        if is_linked and key in self._linked:
            return self._linked[key]
        node = Node(
            state.st_mode,
            uid=state.st_uid,
            gid=state.st_gid,
            mtime_ns=state.st_mtime_ns,
            xattrs=self._xattrs(full, path),
        )
        if kind == stat.S_IFDIR:
            node.kids = {}
        elif kind == stat.S_IFLNK:
            node.target = os.readlink(full)  # noqa: PTH115 - bytes
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = state.st_rdev
        elif kind == stat.S_IFREG:
            node.size = state.st_size
        is_whiteout = self._is_layer and kind == stat.S_IFCHR and state.st_rdev == 0
        if not is_whiteout:
            check_node(node, path)
        if kind == stat.S_IFREG:
            self._writer.add_path(node, full)
        if is_linked:
            self._linked[key] = node
        return node

    def _xattrs(self, full: bytes, path: bytes) -> Xattrs:
        found = []
        for text in _list_xattrs(full):
            name = os.fsencode(text)
            if self._is_layer and name in PRIVATE_MARKS:
                continue
            if self._is_layer and name in _LAYER_REFUSES:
                raise UnrepresentableError(
                    "a layer whose files are metadata only, or renamed folders",
                    where=printable(path),
                    hint="mount it with metacopy=off,redirect_dir=off; nagara does so "
                    "above a single image, on Linux 6.16 and newer",
                )
            if not name.startswith(_KEPT):
                raise UnrepresentableError(
                    f"the extended attribute {printable(name)} cannot be kept",
                    where=printable(path),
                )
            try:
                found.append((name, os.getxattr(full, name, follow_symlinks=False)))
            except OSError as error:
                if error.errno == errno.ENODATA:
                    continue  # it went away between list and get
                raise SourceError(
                    f"the extended attribute {printable(name)} cannot be read: {error.strerror}",
                    where=os.fsdecode(full),
                ) from error
        return tuple(sorted(found))


def _list_xattrs(full: bytes) -> list[str]:
    try:
        return os.listxattr(full, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return []
        raise
