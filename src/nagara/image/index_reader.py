"""Reading an index back into a tree, trusting none of it. Pure.

It accepts what `index` writes and nothing else that EROFS allows: no compression, no shared
attributes, no data blocks but for folders, links and small files. Every offset is checked before
it is used; a folder that contains itself, or is contained twice, is refused; the work is bounded
by the size of the index.
"""

import itertools
import stat
from typing import NamedTuple

from nagara.image.errors import BadIndexError, UnrepresentableError
from nagara.image.index import (
    BLOCK,
    CHUNK_BITS_LIMIT,
    CHUNKED,
    DIRENT,
    FEATURE_CHUNKED,
    FILE_TYPES,
    INLINE,
    INODE,
    MAGIC,
    PLAIN,
    SLOT,
    SUPER,
    SUPER_AT,
    decode_device,
)
from nagara.image.tree import INLINE_LIMIT_BYTES, SIZE_LIMIT, TARGET_LIMIT, Node, check_node
from nagara.image.xattrs import METACOPY, REDIRECT, decode, pointed_to, unescaped
from nagara.store.errors import BadNameError
from nagara.store.names import ObjectName, parse_name

_HEADER_BYTES = SUPER_AT + SUPER.size
_FOLDER_LIMIT_BYTES = 1 << 30
_DATA_LIMIT_BYTES = 4 * BLOCK


class _Inode(NamedTuple):
    layout: int
    mode: int
    size: int
    union: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    xattrs_at: int
    data_at: int


def read_index(data: bytes | memoryview, *, is_layer: bool = False) -> Node:
    """The tree that an index holds.

    Raises `BadIndexError` for anything malformed, and for objects named in a way that could
    mean something else than one object.
    """
    return _Reader(bytes(data[:_HEADER_BYTES]), memoryview(data), is_layer=is_layer).tree()


def is_index(head: bytes) -> bool:
    """The first 4 KiB look like an index."""
    if len(head) < _HEADER_BYTES:
        return False
    return int.from_bytes(head[SUPER_AT : SUPER_AT + 4], "little") == MAGIC


class _Reader:
    def __init__(self, head: bytes, data: memoryview, *, is_layer: bool) -> None:
        if not is_index(head):
            raise BadIndexError("it is no index: the magic number is missing")
        fields = SUPER.unpack_from(head, SUPER_AT)
        block_bits, root, inodes, blocks = fields[3], fields[5], fields[6], fields[9]
        incompatible, extra = fields[14], (fields[1], fields[2], *fields[15:])
        if block_bits != BLOCK.bit_length() - 1 or incompatible != FEATURE_CHUNKED or any(extra):
            raise BadIndexError("it uses features that no index of ours has")
        if blocks * BLOCK != len(data) or fields[10] or fields[11]:
            raise BadIndexError("its size is not the one it says")
        self._data = data
        self._size = len(data)
        self._root = root
        self._left = inodes  # inodes that may still be met
        self._is_layer = is_layer
        self._nodes: dict[int, Node] = {}
        self._links: dict[int, int] = {}  # names still expected, by inode

    def tree(self) -> Node:
        root = self._node(self._root)
        if root.kids is None:
            raise BadIndexError("its root is no folder")
        pending = [(root, self._root, self._root)]
        while pending:
            folder, nid, parent = pending.pop()
            folders = 0
            for name, kid_nid, kind in self._entries(nid):
                if name in (b".", b".."):
                    if kid_nid != (nid if name == b"." else parent):
                        raise BadIndexError("a folder's `.` or `..` leads elsewhere")
                    continue
                kid = self._kid(kid_nid, kind)
                assert folder.kids is not None
                folder.kids[name] = kid
                if not (self._is_layer and kid.kind == stat.S_IFCHR and kid.rdev == 0):
                    self._check(kid, name)
                if kid.kids is not None:
                    folders += 1
                    pending.append((kid, kid_nid, nid))
            if self._inode(nid).nlink != folders + 2:
                raise BadIndexError("a folder has a wrong number of links")
        if any(self._links.values()):
            raise BadIndexError("a file has a wrong number of links")
        return root

    def _kid(self, nid: int, kind: int) -> Node:
        known = self._nodes.get(nid)
        if known is not None:
            if known.kids is not None:
                raise BadIndexError("a folder is in two places")
            self._links[nid] -= 1
            kid = known
        else:
            kid = self._node(nid)
        if FILE_TYPES[kid.kind] != kind:
            raise BadIndexError("a folder calls a file something else than it is")
        return kid

    def _node(self, nid: int) -> Node:
        self._left -= 1
        if self._left < 0:
            raise BadIndexError("it has more inodes than it says")
        inode = self._inode(nid)
        if stat.S_IFMT(inode.mode) not in FILE_TYPES:
            raise BadIndexError("a file of no known type")
        node = Node(inode.mode, uid=inode.uid, gid=inode.gid, mtime_ns=inode.mtime_ns)
        body = bytes(self._slice(inode.xattrs_at, inode.data_at - inode.xattrs_at))
        target = pointed_to(body)
        if target is not None and inode.layout == CHUNKED and node.kind == stat.S_IFREG:
            node.size = inode.size
            node.content = _content(inode, target)
        else:
            xattrs = decode(body)
            node.xattrs = self._own(xattrs)
            self._fill(node, inode, dict(xattrs))
        self._nodes[nid] = node
        if node.kids is None:
            self._links[nid] = inode.nlink - 1
        return node

    def _own(self, xattrs: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
        if self._is_layer:
            return tuple(pair for pair in xattrs if pair[0] not in (METACOPY, REDIRECT))
        return unescaped(xattrs)

    def _fill(self, node: Node, inode: _Inode, xattrs: dict[bytes, bytes]) -> None:
        kind = node.kind
        if kind == stat.S_IFDIR:
            node.kids = {}
        elif kind == stat.S_IFLNK:
            node.target = self._bytes(inode, TARGET_LIMIT)
        elif kind == stat.S_IFREG:
            node.size = inode.size
            if inode.layout == CHUNKED:
                if xattrs.get(METACOPY) != b"":
                    raise BadIndexError("a file whose content is nowhere")
                node.content = _content(inode, xattrs.get(REDIRECT, b""))
                return
            if inode.size:
                node.inline = self._bytes(inode, INLINE_LIMIT_BYTES)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            node.rdev = decode_device(inode.union)
        if METACOPY in xattrs or REDIRECT in xattrs or inode.layout == CHUNKED:
            raise BadIndexError("only a file's content may be elsewhere")

    def _inode(self, nid: int) -> _Inode:
        at = nid * SLOT
        if at + INODE.size > self._size:
            raise BadIndexError("something lies beyond its end")
        (form, icount, mode, _, size, union, _, uid, gid, seconds, nano, nlink) = INODE.unpack_from(
            self._data, at
        )
        layout = form >> 1
        if not form & 1 or layout not in (PLAIN, INLINE, CHUNKED) or nano >= 10**9:
            raise BadIndexError("an inode of an unknown form")
        if size > SIZE_LIMIT:
            raise BadIndexError("a file that is too large")
        if seconds >= 1 << 63:
            seconds -= 1 << 64
        at += INODE.size
        xattr_bytes = 12 + 4 * (icount - 1) if icount else 0
        return _Inode(
            layout, mode, size, union, uid, gid, seconds * 10**9 + nano, nlink, at, at + xattr_bytes
        )

    def _bytes(self, inode: _Inode, limit: int) -> bytes:
        """What is behind an inode, or in blocks of its own."""
        if inode.size > limit:
            raise BadIndexError("it holds more in one file than an index may")
        whole = inode.size // BLOCK if inode.layout == INLINE else -(-inode.size // BLOCK)
        if inode.layout == CHUNKED:
            raise BadIndexError("a folder or link in chunks")
        in_blocks = min(whole * BLOCK, inode.size)
        data = bytes(self._slice(inode.union * BLOCK, in_blocks)) if whole else b""
        tail = inode.size - in_blocks
        if tail and inode.data_at % BLOCK + tail > BLOCK:
            raise BadIndexError("what is inline crosses a block")
        return data + bytes(self._slice(inode.data_at, tail))

    def _entries(self, nid: int) -> list[tuple[bytes, int, int]]:
        data = self._bytes(self._inode(nid), _FOLDER_LIMIT_BYTES)
        found: list[tuple[bytes, int, int]] = []
        for start in range(0, len(data), BLOCK):
            found += _block_entries(data[start : start + BLOCK], is_last=start + BLOCK >= len(data))
        names = [name for name, _, _ in found]
        if any(a >= b for a, b in itertools.pairwise(names)):
            raise BadIndexError("a folder is not sorted, or has a name twice")
        if b"." not in names or b".." not in names:
            raise BadIndexError("a folder without `.` and `..`")
        return found

    def _slice(self, start: int, length: int) -> memoryview:
        if start < 0 or start + length > self._size:
            raise BadIndexError("something lies beyond its end")
        return self._data[start : start + length]

    def _check(self, node: Node, name: bytes) -> None:
        try:
            check_node(node, name)
        except UnrepresentableError as error:
            raise BadIndexError(error.what, where=error.where) from error


def _block_entries(block: bytes, *, is_last: bool) -> list[tuple[bytes, int, int]]:
    if len(block) < DIRENT.size:
        raise BadIndexError("a folder's block is cut")
    first = DIRENT.unpack_from(block)[1]
    if first % DIRENT.size or not DIRENT.size <= first <= len(block):
        raise BadIndexError("a folder's block is malformed")
    heads = [DIRENT.unpack_from(block, at) for at in range(0, first, DIRENT.size)]
    ends = [head[1] for head in heads[1:]] + [len(block)]
    found = []
    for (nid, where, kind, _), end in zip(heads, ends, strict=True):
        if not first <= where < end <= len(block):
            raise BadIndexError("a folder's block is malformed")
        name = block[where:end]
        if end == len(block) and not is_last:
            name = name.rstrip(b"\0")
        if not name or b"\0" in name or b"/" in name:
            raise BadIndexError("a name that cannot be one")
        found.append((name, nid, kind))
    return found


def _content(inode: _Inode, redirect: bytes) -> ObjectName:
    if not redirect.startswith(b"/"):
        raise BadIndexError("a file whose content is nowhere")
    if inode.union & ~CHUNK_BITS_LIMIT:
        raise BadIndexError("chunks of an unknown form")
    try:
        name = parse_name(redirect[1:].decode("ascii"))
    except (BadNameError, UnicodeDecodeError) as error:
        raise BadIndexError(f"a file points to something that is no object: {error}") from error
    if name.size != inode.size or not name.size:
        raise BadIndexError("a file has another size than its content")
    return name
