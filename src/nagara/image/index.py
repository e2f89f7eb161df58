"""Writing an image's index: an EROFS file that holds a tree without its contents. Pure.

Format: linux/fs/erofs/erofs_fs.h. Extended inodes; folders, links and small files inline behind
their inode; a larger file is *chunk-based with null chunks*, so its size costs nothing, and
carries overlay's attributes that name its object in the data layer.

The same tree gives the same bytes on every machine: names are sorted, and no time, host or
version is in it. So an index has a hash, and equal images have equal indices.

    block 0: 1024 bytes unused | superblock | inodes, ascending | blocks of what is not inline
"""

import stat
import struct
from collections.abc import Iterator

from nagara.image.tree import Node, check_node, walk
from nagara.image.xattrs import encode, escaped

BLOCK = 4096
SUPER_AT = 1024
MAGIC = 0xE0F5E1E2
SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBB")
INODE = struct.Struct("<HHHHQIIIIQII16x")
DIRENT = struct.Struct("<QHBB")
SLOT = 32  # inodes begin at multiples of it; a node's id is its offset by this
PLAIN, INLINE, CHUNKED = 0, 2, 4  # data layouts
FEATURE_CHUNKED = 4
NULL_BLOCK = 0xFFFFFFFF
CHUNK_BITS_LIMIT = 31
FILE_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
_FIRST_INODE = 1152  # behind the superblock, a multiple of SLOT
_PIECE_BYTES = 1 << 20


class _Place:
    """Where one node lies and how."""

    __slots__ = ("blocks", "layout", "nlink", "offset", "parent", "size", "tail", "xattrs")

    def __init__(self, parent: int) -> None:
        self.parent = parent  # number of the folder it was found in
        self.nlink = 0
        self.layout = PLAIN
        self.size = 0
        self.blocks = 0  # blocks of data that are not inline
        self.tail = 0  # bytes behind the inode
        self.offset = 0
        self.xattrs = b""


class _Layout:
    """The nodes in their order, with their places."""

    def __init__(self, root: Node, *, is_layer: bool) -> None:
        self._is_layer = is_layer
        self.nodes: list[Node] = []
        self.places: list[_Place] = []
        self._number(root)
        self.meta_bytes = self._place_all()

    def _xattrs(self, node: Node) -> bytes:
        """A layer's own marks are orders to overlay and stay what they are."""
        own = node.xattrs if self._is_layer else escaped(node.xattrs)
        return encode(tuple(sorted(own)) if own else (), node.content)

    def _number(self, root: Node) -> None:
        for _, node in walk(root):
            node.number = -1
        pending = [(root, 0)]
        while pending:
            node, parent = pending.pop()
            node.number = len(self.nodes)
            self.nodes.append(node)
            place = _Place(parent)
            self.places.append(place)
            if node.kids is None:
                continue
            place.nlink += 2
            fresh = []
            for name in sorted(node.kids):
                kid = node.kids[name]
                if kid.kids is not None:
                    place.nlink += 1
                    fresh.append((kid, node.number))
                elif kid.number < 0:
                    kid.number = len(self.nodes)
                    self.nodes.append(kid)
                    self.places.append(_Place(node.number))
                    self.places[kid.number].nlink = 1
                else:
                    self.places[kid.number].nlink += 1
            pending.extend(reversed(fresh))

    def _place_all(self) -> int:
        offset = _FIRST_INODE
        for node, place in zip(self.nodes, self.places, strict=True):
            place.xattrs = self._xattrs(node)
            self._choose_layout(node, place)
            head = INODE.size + len(place.xattrs)
            if place.layout == INLINE:
                if head + place.tail > BLOCK:  # an inline tail may not cross a block
                    place.layout, place.tail = PLAIN, 0
                    place.blocks = -(-place.size // BLOCK)
                elif offset % BLOCK + head + place.tail > BLOCK:
                    offset += -offset % BLOCK
            place.offset = offset
            offset += head + place.tail
            offset += -offset % SLOT
        return offset + -offset % BLOCK

    def _choose_layout(self, node: Node, place: _Place) -> None:
        if node.kids is not None:
            blocks = list(_folder_blocks(node))
            place.layout = INLINE
            place.blocks, place.tail = len(blocks) - 1, blocks[-1][1]
            place.size = place.blocks * BLOCK + place.tail
        elif node.target is not None or node.inline is not None:
            place.layout = INLINE
            place.size = place.tail = len(node.target or node.inline or b"")
        elif node.content is not None:
            place.layout, place.size = CHUNKED, node.size
            place.tail = 4 * -(-node.size // (BLOCK << _chunk_bits(node.size)))


def build_index(root: Node, *, is_layer: bool = False) -> Iterator[bytes]:
    """The index of a tree, in pieces to be written one after another.

    Args:
        is_layer: the tree is a layer for overlay: whiteouts and `trusted.overlay.` attributes
            in it are marks to be obeyed, not content.

    Raises:
        UnrepresentableError: names what cannot be kept.
    """
    for path, node in walk(root):
        if is_layer and node.kind == stat.S_IFCHR and node.rdev == 0:
            continue
        check_node(node, path)
    layout = _Layout(root, is_layer=is_layer)
    first_block = block = layout.meta_bytes // BLOCK
    data_blocks = sum(place.blocks for place in layout.places)
    out = bytearray(_super_block(layout, first_block + data_blocks))
    at = 0  # offset of `out` within the file
    for node, place in zip(layout.nodes, layout.places, strict=True):
        out += bytes(place.offset - at - len(out))
        out += _inode(layout, node, place, block)
        block += place.blocks
        if len(out) >= _PIECE_BYTES:
            yield bytes(out)
            at += len(out)
            out.clear()
    out += bytes(layout.meta_bytes - at - len(out))
    yield bytes(out)
    for node, place in zip(layout.nodes, layout.places, strict=True):
        if place.blocks:
            data = _data(layout, node)[: place.blocks * BLOCK]
            yield data + bytes(-len(data) % BLOCK)


def _super_block(layout: _Layout, blocks: int) -> bytes:
    root = layout.places[0].offset // SLOT
    packed = SUPER.pack(
        MAGIC, 0, 0, BLOCK.bit_length() - 1, 0, root, len(layout.nodes), 0, 0, blocks, 0, 0,
        bytes(16), bytes(16), FEATURE_CHUNKED, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return bytes(SUPER_AT) + packed


def _inode(layout: _Layout, node: Node, place: _Place, block: int) -> bytes:
    if place.layout == CHUNKED:
        union = _chunk_bits(node.size)
    elif node.kind in (stat.S_IFCHR, stat.S_IFBLK):
        union = encode_device(node.rdev)
    elif place.blocks:
        union = block
    else:
        union = NULL_BLOCK if place.layout == INLINE else 0
    xattrs = place.xattrs
    seconds, nanoseconds = divmod(node.mtime_ns, 10**9)
    head = INODE.pack(
        1 | place.layout << 1, (len(xattrs) - 12) // 4 + 1 if xattrs else 0, node.mode, 0,
        place.size, union, node.number + 1, node.uid, node.gid,
        seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, place.nlink,
    )  # fmt: skip
    if place.layout == CHUNKED:
        return head + xattrs + b"\xff" * place.tail
    if place.tail:
        return head + xattrs + _data(layout, node)[place.blocks * BLOCK :]
    return head + xattrs


def _data(layout: _Layout, node: Node) -> bytes:
    if node.kids is None:
        return node.target or node.inline or b""
    blocks = []
    for names, size in _folder_blocks(node):
        where = DIRENT.size * len(names)
        entries = []
        for name in names:
            number = node.number
            if name == b"..":
                number = layout.places[node.number].parent
            elif name != b".":
                number = node.kids[name].number
            nid = layout.places[number].offset // SLOT
            kind = FILE_TYPES[layout.nodes[number].kind]
            entries.append(DIRENT.pack(nid, where, kind, 0))
            where += len(name)
        assert where == size
        blocks.append(b"".join(entries) + b"".join(names))
    return b"".join(block.ljust(BLOCK, b"\0") for block in blocks[:-1]) + blocks[-1]


def _folder_blocks(node: Node) -> Iterator[tuple[list[bytes], int]]:
    """A folder's names, sorted, as they fill blocks: (names, bytes used)."""
    assert node.kids is not None
    names: list[bytes] = []
    used = 0
    for name in sorted((b".", b"..", *node.kids)):
        size = DIRENT.size + len(name)
        if used + size > BLOCK:
            yield names, used
            names, used = [], 0
        names.append(name)
        used += size
    yield names, used


def _chunk_bits(size: int) -> int:
    """The smallest chunk that covers the file, up to 8 TiB: log2 of its blocks."""
    return min(max(0, (size - 1).bit_length() - 12), CHUNK_BITS_LIMIT)


def encode_device(rdev: int) -> int:
    """A device number as the kernel's new_encode_dev() writes it."""
    major = (rdev >> 8) & 0xFFF | (rdev >> 32) & 0xFFFFF000
    minor = rdev & 0xFF | (rdev >> 12) & 0xFFFFFF00
    return minor & 0xFF | (major & 0xFFF) << 8 | (minor & ~0xFF) << 12


def decode_device(raw: int) -> int:
    """The inverse of `encode_device`, as os.makedev() writes it."""
    major, minor = (raw >> 8) & 0xFFF, raw & 0xFF | (raw >> 12) & 0xFFF00
    return (minor & 0xFF) | (major & 0xFFF) << 8 | (minor & ~0xFF) << 12
