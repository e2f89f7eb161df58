"""A file tree in memory: everything of it but the contents. Pure.

A file that has several names is one `Node` under several parents' `kids`. Names, link targets and
attribute values are bytes: the kernel gives them no encoding.
"""

import stat
from collections.abc import Iterator

from nagara.image.errors import UnrepresentableError
from nagara.store.names import ObjectName

NAME_LIMIT = 255
TARGET_LIMIT = 4095
VALUE_LIMIT = 65535
SIZE_LIMIT = 1 << 50
# Files up to this size lie in the index itself: a third of all files for a few megabytes.
INLINE_LIMIT_BYTES = 2048

Xattrs = tuple[tuple[bytes, bytes], ...]


class Node:
    """One file, folder, link or special file.

    Which of `kids` (folder), `target` (symbolic link), `inline` (small file) and `content` (file)
    is set follows from `mode`; an empty file has none.
    """

    __slots__ = (
        "content",
        "gid",
        "inline",
        "kids",
        "mode",
        "mtime_ns",
        "number",
        "rdev",
        "size",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(
        self,
        mode: int,
        *,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        size: int = 0,
        rdev: int = 0,
        xattrs: Xattrs = (),
        kids: "dict[bytes, Node] | None" = None,
        target: bytes | None = None,
        content: ObjectName | None = None,
        inline: bytes | None = None,
    ) -> None:
        self.mode = mode  # type and permissions, as in stat
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns  # since the epoch; may be negative
        self.size = size  # of regular files
        self.rdev = rdev  # as os.makedev makes it
        self.xattrs = xattrs
        self.kids = kids
        self.target = target
        self.content = content
        self.inline = inline
        self.number = -1  # free for whoever walks

    @property
    def kind(self) -> int:
        """`stat.S_IFREG` and so on."""
        return stat.S_IFMT(self.mode)

    @property
    def is_folder(self) -> bool:
        return self.kids is not None


def new_folder(mode: int = 0o755) -> Node:
    """An empty folder of root's, from the epoch."""
    return Node(stat.S_IFDIR | mode, kids={})


def walk(root: Node) -> Iterator[tuple[bytes, Node]]:
    """Every name with its node, folders before what is in them, sorted; the root is `b""`."""
    pending: list[tuple[bytes, Node]] = [(b"", root)]
    while pending:
        path, node = pending.pop()
        yield path, node
        if node.kids:
            prefix = path + b"/" if path else b""
            pending.extend((prefix + name, node.kids[name]) for name in sorted(node.kids)[::-1])


def contents(root: Node) -> set[ObjectName]:
    """The objects a tree needs."""
    found: set[ObjectName] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node.content is not None:
            found.add(node.content)
        if node.kids:
            pending.extend(node.kids.values())
    return found


def check_node(node: Node, path: bytes) -> None:
    """Raises `UnrepresentableError` for what no index can hold, naming the path."""
    fault = _fault(node)
    name = path.rpartition(b"/")[2]
    if len(name) > NAME_LIMIT:
        fault = f"a name of {len(name)} bytes"
    elif name in (b".", b"..") or b"\0" in name:
        fault = "a name that cannot be one"
    if fault:
        raise UnrepresentableError(f"{fault} cannot be kept", where=printable(path))


def _fault(node: Node) -> str | None:
    if node.target is not None and not 0 < len(node.target) <= TARGET_LIMIT:
        return f"a link's target of {len(node.target)} bytes"
    if not 0 <= node.size <= SIZE_LIMIT:
        return f"a file of {node.size} bytes"
    if not (0 <= node.uid < 1 << 32 and 0 <= node.gid < 1 << 32):
        return f"an owner {node.uid}:{node.gid}"
    if not -(1 << 63) <= node.mtime_ns // 10**9 < 1 << 63:
        return "a time out of range"
    if node.kind == stat.S_IFCHR and node.rdev == 0:
        return "a character device 0:0 (overlay takes it for a whiteout)"
    for name, value in node.xattrs:
        if len(value) > VALUE_LIMIT or len(name) > NAME_LIMIT:
            return f"the extended attribute {printable(name)}"
    return None


def printable(path: bytes) -> str:
    """For messages: what is not UTF-8 or not printable is shown as an escape."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
