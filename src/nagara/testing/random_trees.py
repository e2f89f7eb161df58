"""Random file trees: in memory for what is pure, on the disk for what is mounted.

Needs hypothesis, which tests have.
"""

import os
import random
import stat
from pathlib import Path

from hypothesis import strategies as st

from nagara.image.tree import INLINE_LIMIT_BYTES, Node
from nagara.store.names import ObjectName
from nagara.testing.objects import noise

_names = st.binary(min_size=1, max_size=40).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
_xattrs = st.dictionaries(
    st.sampled_from(
        [b"user.a", b"user.b\xff", b"trusted.c", b"security.capability",
         b"trusted.overlay.opaque", b"trusted.overlay.redirect", b"system.posix_acl_access"]
    ),
    st.binary(max_size=300),
    max_size=3,
).map(lambda found: tuple(sorted(found.items())))  # fmt: skip


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Anything but a folder."""
    kind = draw(st.sampled_from(["empty", "inline", "content", "link", "char", "fifo", "socket"]))
    node = Node(
        draw(st.integers(0, 0o7777)),
        uid=draw(st.integers(0, (1 << 32) - 1)),
        gid=draw(st.integers(0, 70000)),
        mtime_ns=draw(st.integers(-(10**18), 10**19)),
        xattrs=draw(_xattrs),
    )
    if kind in ("empty", "inline", "content"):
        node.mode |= stat.S_IFREG
    if kind == "inline":
        node.inline = draw(st.binary(min_size=1, max_size=INLINE_LIMIT_BYTES))
        node.size = len(node.inline)
    elif kind == "content":
        node.size = draw(st.integers(INLINE_LIMIT_BYTES + 1, 1 << 45))
        node.content = ObjectName(draw(st.binary(min_size=32, max_size=32)), node.size)
    elif kind == "link":
        node.mode |= stat.S_IFLNK
        node.target = draw(st.binary(min_size=1, max_size=4095))
    elif kind == "char":
        node.mode |= draw(st.sampled_from([stat.S_IFCHR, stat.S_IFBLK]))
        node.rdev = os.makedev(draw(st.integers(1, 4095)), draw(st.integers(0, (1 << 20) - 1)))
    elif kind == "fifo":
        node.mode |= stat.S_IFIFO
    elif kind == "socket":
        node.mode |= stat.S_IFSOCK
    return node


@st.composite
def trees(draw: st.DrawFn) -> Node:
    """A tree of up to some forty nodes, some of them under several names."""
    root = Node(stat.S_IFDIR | draw(st.integers(0, 0o7777)), kids={}, xattrs=draw(_xattrs))
    folders = [root]
    files: list[Node] = []
    for _ in range(draw(st.integers(0, 20))):
        parent = draw(st.sampled_from(folders))
        assert parent.kids is not None
        name = draw(_names)
        if name in parent.kids:
            continue
        what = draw(st.sampled_from(["folder", "file", "file", "again"]))
        if what == "folder":
            parent.kids[name] = Node(
                stat.S_IFDIR | 0o755, kids={}, mtime_ns=draw(st.integers(0, 99))
            )
            folders.append(parent.kids[name])
        elif what == "again" and files:
            parent.kids[name] = draw(st.sampled_from(files))
        else:
            parent.kids[name] = draw(nodes())
            files.append(parent.kids[name])
    return root


def make_folder(folder: Path, seed: int, *, files: int = 60, largest: int = 1 << 20) -> None:
    """A folder of this machine with a bit of everything (as root), the same for a seed."""
    rng = random.Random(seed)  # noqa: S311
    folder.mkdir()
    folders = [os.fsencode(folder)]
    made: list[bytes] = []
    for number in range(files):
        parent = rng.choice(folders)
        name = rng.choice([b"plain-%d", b"sp ace %d", b"\xff\xfe%d", b"new\nline%d", b"c:o,m=%d"])
        path = parent + b"/" + name % number
        kind = rng.choice(["folder", "file", "file", "file", "file", "sparse", "link", "hard",
                           "fifo", "socket", "device"])  # fmt: skip
        if kind == "folder":
            os.mkdir(path)  # noqa: PTH102 - bytes
            folders.append(path)
        elif kind == "hard" and made:
            os.link(rng.choice(made), path)
            continue
        else:
            _make(path, kind, rng, largest)
            if kind == "file":
                made.append(path)
        _adorn(path, kind, rng)
    for path in folders[::-1]:
        os.utime(path, ns=(0, rng.randrange(10**18)))


def _make(path: bytes, kind: str, rng: random.Random, largest: int) -> None:
    if kind == "link":
        os.symlink(rng.choice([b"x" * 200, b"../..", b"\xff", b"loop"]), path)  # noqa: PTH211
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(rng.randrange(1, 400), rng.randrange(999)))
    else:
        size = rng.choice([0, 1, 2048, 2049, 4096, 65537, rng.randrange(largest)])
        with open(path, "wb") as file:  # noqa: PTH123 - bytes
            if kind == "sparse":
                file.truncate(size * 50)
                file.seek(size * 20)
            file.write(noise(size, rng.randrange(1 << 30)))


def _adorn(path: bytes, kind: str, rng: random.Random) -> None:
    os.chown(path, rng.randrange(70000), rng.randrange(70000), follow_symlinks=False)
    if kind != "link":
        os.chmod(path, rng.randrange(0o10000) | (0o700 if kind == "folder" else 0))  # noqa: PTH101
        if rng.random() < 0.3:
            os.setxattr(path, b"trusted.overlay.opaque", b"y")
        if rng.random() < 0.3 and kind in ("file", "folder", "sparse"):
            os.setxattr(path, b"user.note", noise(rng.randrange(3000)))
    os.utime(path, ns=(0, rng.randrange(10**18)), follow_symlinks=False)
