import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadIndexError, UnrepresentableError
from nagara.image.folder_import import import_folder
from nagara.image.index import build_index, decode_device, encode_device
from nagara.image.index_reader import read_index
from nagara.image.tree import INLINE_LIMIT_BYTES, SIZE_LIMIT, Node, new_folder, walk
from nagara.store.names import ObjectName, name_bytes
from nagara.store.store import Store
from nagara.testing.random_trees import make_folder, trees

PLAIN = Node(stat.S_IFREG | 0o644, size=5000, content=name_bytes(b"x" * 5000))


def index_of(tree: Node) -> bytes:
    return b"".join(build_index(tree))


def facts(tree: Node) -> dict[bytes, tuple[object, ...]]:
    numbers: dict[int, int] = {}
    return {
        path: (
            node.mode, node.uid, node.gid, node.mtime_ns, node.size, node.rdev,
            tuple(sorted(node.xattrs)), node.target, node.content, node.inline,
            numbers.setdefault(id(node), len(numbers)),
        )
        for path, node in walk(tree)
    }  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_a_tree_is_read_back_from_its_index(tree: Node) -> None:
    packed = index_of(tree)
    assert facts(read_index(packed)) == facts(tree)
    assert index_of(read_index(packed)) == packed


def test_the_order_in_which_a_tree_was_made_does_not_show() -> None:
    def tree(names: list[bytes]) -> Node:
        root = new_folder()
        for name in names:
            assert root.kids is not None
            root.kids[name] = Node(stat.S_IFREG | 0o644)
        return root

    names = [b"%d" % n for n in range(1000)]
    assert index_of(tree(names)) == index_of(tree(names[::-1]))


def test_folders_that_fill_many_blocks_and_names_of_all_lengths() -> None:
    root = new_folder()
    assert root.kids is not None
    for number in range(3000):
        name = b"%d" % number + b"n" * (number % 250)
        root.kids[name[:255]] = Node(stat.S_IFREG | 0o644, mtime_ns=number)
    assert facts(read_index(index_of(root))) == facts(root)


@pytest.mark.parametrize("major", [0, 1, 8, 259, 4095])
@pytest.mark.parametrize("minor", [0, 1, 255, 256, 65535, (1 << 20) - 1])
def test_device_numbers_are_kept(major: int, minor: int) -> None:
    assert decode_device(encode_device(os.makedev(major, minor))) == os.makedev(major, minor)


@pytest.mark.parametrize(
    ("name", "node"),
    [
        (b"x", Node(stat.S_IFCHR | 0o600, rdev=0)),
        (b"x", Node(stat.S_IFLNK | 0o777, target=b"")),
        (b"x", Node(stat.S_IFLNK | 0o777, target=b"t" * 4096)),
        (b"x", Node(stat.S_IFREG, xattrs=((b"other.x", b""),))),
        (b"x", Node(stat.S_IFREG, xattrs=((b"user.x", b"v" * 65536),))),
        (b"x", Node(stat.S_IFREG, uid=1 << 32)),
        (b"x", Node(stat.S_IFREG, size=SIZE_LIMIT + 1, content=ObjectName(bytes(32), 1))),
        (b"n" * 256, Node(stat.S_IFREG)),
        (b"..", Node(stat.S_IFREG)),
    ],
)
def test_what_cannot_be_kept_is_named(name: bytes, node: Node) -> None:
    root = new_folder()
    assert root.kids is not None
    root.kids[name] = node
    with pytest.raises(UnrepresentableError):
        index_of(root)


def test_in_a_layer_whiteouts_and_marks_are_kept_as_they_are() -> None:
    root = new_folder()
    assert root.kids is not None
    root.kids[b"gone"] = Node(stat.S_IFCHR, rdev=0)
    root.kids[b"d"] = new_folder()
    root.kids[b"d"].xattrs = ((b"trusted.overlay.opaque", b"y"),)
    root.kids[b"f"] = PLAIN
    packed = b"".join(build_index(root, is_layer=True))
    assert b"overlay.opaque" in packed
    assert b"overlay.overlay.opaque" not in packed
    assert facts(read_index(packed, is_layer=True)) == facts(root)
    with pytest.raises(BadIndexError):
        read_index(packed)


def sample() -> bytes:
    root = new_folder()
    assert root.kids is not None
    deep = new_folder()
    assert deep.kids is not None
    root.kids[b"d"] = deep
    root.kids[b"f"] = deep.kids[b"h"] = PLAIN
    deep.kids[b"s"] = Node(stat.S_IFLNK | 0o777, target=b"../f")
    deep.kids[b"small"] = Node(stat.S_IFREG, size=3, inline=b"abc", xattrs=((b"user.x", b"y"),))
    for number in range(300):
        deep.kids[b"many-%d" % number] = Node(stat.S_IFREG | 0o644)
    return index_of(root)


SAMPLE = sample()


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1024, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=8
    ),
    st.one_of(st.none(), st.integers(0, len(SAMPLE))),
)
def test_a_damaged_index_is_read_or_refused_and_nothing_else(
    changes: list[tuple[int, int]], cut: int | None
) -> None:
    raw = bytearray(SAMPLE)
    for at, value in changes:
        raw[at] = value
    try:
        tree = read_index(bytes(raw[:cut]))
    except BadIndexError:
        return
    for _, node in walk(tree):  # no circle, nothing beyond what an index may hold
        assert node.inline is None or len(node.inline) <= INLINE_LIMIT_BYTES


@pytest.mark.parametrize(
    "target", [b"/../other", b"/x", b"//", b"", b"/" + b"a" * 52 + b".5", b"/\xff"]
)
def test_an_index_cannot_point_to_anything_but_an_object(target: bytes) -> None:
    redirect = b"/" + str(PLAIN.content).encode()
    raw = SAMPLE.replace(redirect, target.ljust(len(redirect), b"\0"))
    assert raw != SAMPLE
    with pytest.raises(BadIndexError):
        read_index(raw)


@pytest.mark.root
def test_a_folder_of_this_machine_is_imported_as_it_is(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_folder(source, seed=1)
    with ContentWriter(store) as writer:
        tree = import_folder(source, writer)
    assert facts(read_index(index_of(tree))) == facts(tree)
    again = tmp_path / "again"
    subprocess.run(["cp", "-a", "--preserve=all", source, again], check=True)
    with ContentWriter(store) as writer:
        same = import_folder(again, writer)
    assert writer.new == {}
    assert index_of(same) == index_of(tree)
