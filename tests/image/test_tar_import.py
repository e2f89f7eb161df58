import gzip
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nagara.base.errors import NagaraError
from nagara.image.compression import decompressed
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadArchiveError, ImageError, UnrepresentableError
from nagara.image.index import build_index
from nagara.image.index_reader import read_index
from nagara.image.tar_import import LayeredTree
from nagara.image.tree import Node, walk
from nagara.store.store import Store
from nagara.testing.objects import noise

Member = tuple[str, dict[str, Any], bytes]


def member(name: str, content: bytes = b"", **fields: Any) -> Member:
    return name, fields, content


def folder(name: str, mode: int = 0o755, **fields: Any) -> Member:
    return member(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def link(name: str, target: str) -> Member:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hard(name: str, target: str) -> Member:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def layer(*members: Member) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(
        fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape"
    ) as archive:
        for name, fields, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


@pytest.fixture
def make_tree(store: Store) -> Callable[..., Node]:
    def make(*layers: bytes) -> Node:
        with ContentWriter(store) as writer:
            tree = LayeredTree(writer)
            for number, raw in enumerate(layers):
                tree.add_layer(io.BytesIO(raw), f"layer {number}")
        # Whatever comes out can be written as an index and is read back the same.
        packed = b"".join(build_index(tree.root))
        assert b"".join(build_index(read_index(packed))) == packed
        return tree.root

    return make


def paths(tree: Node) -> dict[str, bytes | str]:
    """Path → content, link target, or `/` for folders."""
    found: dict[str, bytes | str] = {}
    for path, node in walk(tree):
        if path:
            shown: bytes | str = node.inline or b""
            if node.is_folder:
                shown = "/"
            elif node.target is not None:
                shown = "→" + node.target.decode()
            found[path.decode("utf-8", "surrogateescape")] = shown
    return found


def test_files_folders_links_and_parents_that_are_not_named(make_tree: Any) -> None:
    tree = make_tree(layer(member("./a/b/c", b"x"), folder("a/", uid=7), link("l", "a/b")))
    assert paths(tree) == {"a": "/", "a/b": "/", "a/b/c": b"x", "l": "→a/b"}
    assert tree.kids[b"a"].uid == 7


@pytest.mark.parametrize(
    "hostile",
    [
        member("../x", b"x"),
        member("a/../../x", b"x"),
        member("/a/../../x", b"x"),
        link(".", "/etc"),
        link("./", "/etc"),
        member("", b"x"),
        member("n" * 256, b"x"),
        hard("h", "nowhere"),
        hard("h", "../x"),
        hard("h", "h"),
        member(".wh.", b""),
        member(".wh...", b""),
        member("x", type=b"Q"),
        link("x", ""),
    ],
)
def test_what_means_to_leave_the_tree_or_means_nothing_is_refused(
    make_tree: Any, hostile: Member
) -> None:
    with pytest.raises(ImageError):
        make_tree(layer(hostile))


def test_an_absolute_name_lies_inside(make_tree: Any) -> None:
    assert paths(make_tree(layer(member("/etc/x", b"x")))) == {"etc": "/", "etc/x": b"x"}


def test_a_parent_that_is_a_link_leads_to_where_it_leads_inside(make_tree: Any) -> None:
    tree = make_tree(
        layer(
            folder("usr/lib"),
            link("lib", "usr/lib"),
            link("up", "../../../usr"),
            link("abs", "/usr"),
        ),
        layer(member("lib/a", b"1"), member("up/b", b"2"), member("abs/c", b"3")),
    )
    assert paths(tree) == {
        "usr": "/", "usr/lib": "/", "usr/lib/a": b"1", "usr/b": b"2", "usr/c": b"3",
        "lib": "→usr/lib", "up": "→../../../usr", "abs": "→/usr",
    }  # fmt: skip


def test_links_in_a_circle_are_refused(make_tree: Any) -> None:
    with pytest.raises(BadArchiveError, match="circle"):
        make_tree(layer(link("a", "b"), link("b", "a"), member("a/x", b"x")))


def test_the_last_member_of_a_name_wins_and_kinds_replace_each_other(make_tree: Any) -> None:
    tree = make_tree(
        layer(member("a", b"1"), member("a", b"2"), folder("d"), member("d/x", b"x"),
              link("s", "d"), member("f", b"f")),
        layer(folder("d", mode=0o700), folder("s"), member("s/y", b"y"), folder("f")),
    )  # fmt: skip
    assert paths(tree) == {
        "a": b"2", "d": "/", "d/x": b"x", "s": "/", "s/y": b"y", "f": "/",
    }  # fmt: skip
    assert stat.S_IMODE(tree.kids[b"d"].mode) == 0o700


def test_hard_links_before_and_after_their_targets_and_to_links(make_tree: Any) -> None:
    tree = make_tree(
        layer(hard("early", "late"), hard("chain", "early"), member("late", b"x"),
              link("s", "late"), hard("hs", "s")),
        layer(hard("across", "late"), member("late", b"new"), hard("chain", "chain")),
    )  # fmt: skip
    kids = tree.kids
    assert kids[b"early"] is kids[b"chain"] is kids[b"across"]
    assert kids[b"early"].inline == b"x"
    assert kids[b"late"].inline == b"new"
    assert kids[b"hs"] is kids[b"s"]


@pytest.mark.parametrize("is_first", [True, False])
def test_whiteouts_hide_lower_layers_only_wherever_they_stand(
    make_tree: Any, is_first: bool
) -> None:
    below = layer(folder("d"), member("d/low", b"l"), member("d/both", b"l"), member("gone", b"g"),
                  folder("d/sub"), member("d/sub/low", b"l"))  # fmt: skip
    own = [folder("d"), member("d/both", b"h"), member("d/high", b"h"), folder("d/sub"),
           member("d/sub/high", b"h")]  # fmt: skip
    marks = [
        member("d/.wh..wh..opq"),
        member(".wh.gone"),
        member(".wh.never"),
        member(".wh..wh.plnk"),
    ]
    upper = layer(*(marks + own if is_first else own + marks))
    expected = {
        "d": "/", "d/both": b"h", "d/high": b"h", "d/sub": "/", "d/sub/high": b"h",
    }  # fmt: skip
    assert paths(make_tree(below, upper)) == expected
    assert paths(make_tree(below, layer(), upper)) == expected


def test_a_whiteout_and_a_new_one_of_its_name(make_tree: Any) -> None:
    below = layer(folder("d"), member("d/old", b"o"))
    for upper in (
        layer(member(".wh.d"), folder("d"), member("d/new", b"n")),
        layer(folder("d"), member("d/new", b"n"), member(".wh.d")),
    ):
        assert paths(make_tree(below, upper)) == {"d": "/", "d/new": b"n"}


def test_odd_names_modes_times_owners_attributes_and_devices(make_tree: Any) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000ff")
    headers = {
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.big": "v" * 3000,
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "mtime": "1700000000.123456789",
    }
    tree = make_tree(
        layer(
            member("n" * 255, b"1", mode=0o4755, uid=1 << 31, gid=65534, pax_headers=headers),
            member("\udcff\udcfe\n", b"2"),
            link("s", "t" * 4095),
            member("c", type=tarfile.CHRTYPE, devmajor=8, devminor=300),
            member("b", type=tarfile.BLKTYPE, devmajor=259, devminor=1),
            member("p", type=tarfile.FIFOTYPE),
            member("old", b"3", pax_headers={"mtime": "-1.5"}),
        )
    )
    node = tree.kids[b"n" * 255]
    assert (stat.S_IMODE(node.mode), node.uid, node.gid) == (0o4755, 1 << 31, 65534)
    assert node.mtime_ns == 1700000000123456789
    assert dict(node.xattrs) == {
        b"security.capability": capability,
        b"user.big": b"v" * 3000,
        b"trusted.overlay.opaque": b"y",
    }
    assert tree.kids[b"\xff\xfe\n"].inline == b"2"
    assert (tree.kids[b"s"].kind, tree.kids[b"s"].target) == (stat.S_IFLNK, b"t" * 4095)
    assert (tree.kids[b"c"].kind, tree.kids[b"c"].rdev) == (stat.S_IFCHR, os.makedev(8, 300))
    assert (tree.kids[b"b"].kind, tree.kids[b"b"].rdev) == (stat.S_IFBLK, os.makedev(259, 1))
    assert (tree.kids[b"p"].kind, tree.kids[b"p"].rdev) == (stat.S_IFIFO, 0)
    assert tree.kids[b"old"].mtime_ns == -1_500_000_000


def test_a_device_that_overlay_takes_for_a_whiteout_is_named(make_tree: Any) -> None:
    with pytest.raises(UnrepresentableError, match="d/zero"):
        make_tree(layer(member("d/zero", type=tarfile.CHRTYPE, devmajor=0, devminor=0)))


def test_an_empty_layer_and_a_root_entry(make_tree: Any) -> None:
    tree = make_tree(layer(), layer(folder("./", uid=5)), layer())
    assert (tree.uid, tree.kids) == (5, {})


def test_sparse_members_keep_their_holes(store: Store, make_tree: Any, tmp_path: Any) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5 << 30)
        file.seek(4 << 30)
        file.write(noise(70000))
    for form in ("gnu", "posix"):
        done = subprocess.run(
            ["tar", "-cSf", "-", f"--format={form}", "sparse"], cwd=tmp_path, capture_output=True
        )
        tree = make_tree(done.stdout)
        name = tree.kids[b"sparse"].content
        assert name.size == 5 << 30
        path = store.local.path(name)
        assert path.stat().st_blocks * 512 < 8 << 20
        with path.open("rb") as file:
            file.seek(4 << 30)
            assert file.read(70001) == noise(70000) + b"\0"


class Parts(io.RawIOBase):
    """A stream of bytes and, for a number, so many zeros."""

    def __init__(self, *parts: bytes | int) -> None:
        self._parts = list(parts)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._parts and not self._parts[0]:
            self._parts.pop(0)
        if not self._parts:
            return 0
        part = self._parts[0]
        if isinstance(part, int):
            length = min(part, len(buffer))
            buffer[:length] = bytes(length)
            self._parts[0] = part - length
        else:
            length = min(len(part), len(buffer))
            buffer[:length] = part[:length]
            self._parts[0] = part[length:]
        return length


def test_a_dense_member_of_over_4_gib_is_kept_and_its_zeros_take_no_room(store: Store) -> None:
    size = (4 << 30) + 1
    info, begin = tarfile.TarInfo("dense"), noise(5000)
    info.size = size
    after = tarfile.TarInfo("after").tobuf()
    raw = Parts(info.tobuf(), begin, size - 5001, b"\1", 511, after, 1024)
    with ContentWriter(store) as writer:
        tree = LayeredTree(writer)
        tree.add_layer(cast("BinaryIO", raw), "layer")
    assert tree.root.kids is not None
    assert tree.root.kids.keys() == {b"dense", b"after"}
    name = tree.root.kids[b"dense"].content
    assert name is not None
    assert name.size == size
    path = store.local.path(name)
    assert path.stat().st_blocks * 512 < 8 << 20
    with path.open("rb") as file:
        assert file.read(5001) == begin + b"\0"
        file.seek(-2, os.SEEK_END)
        assert file.read() == b"\0\1"


def test_contents_of_all_sizes_are_kept(store: Store, make_tree: Any) -> None:
    sizes = [0, 1, 2048, 2049, 1 << 20, (1 << 20) + 1, 5_000_000]
    tree = make_tree(layer(*(member(str(size), noise(size)) for size in sizes)))
    for size in sizes:
        node = tree.kids[str(size).encode()]
        content = store.read(node.content) if node.content else node.inline or b""
        assert content == noise(size)
        assert node.size == size


@pytest.mark.parametrize("cut", [1, 300, 512, 700, 1500])
def test_a_cut_layer_is_refused(make_tree: Any, cut: int) -> None:
    raw = layer(member("a", noise(3000)))
    with pytest.raises(ImageError):
        make_tree(raw[:cut])


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz", "zstd", "cat"])
def test_all_compressions_are_undone_and_damage_is_noticed(program: str) -> None:
    content = noise(300_000)
    packed = subprocess.run([program, "-c"] if program != "cat" else ["cat"], input=content,
                            capture_output=True, check=True).stdout  # fmt: skip
    with decompressed(io.BytesIO(packed)) as stream:
        assert stream.read() == content
    if program == "cat":
        return
    with (
        pytest.raises((BadArchiveError, EOFError, OSError, ValueError)),
        decompressed(io.BytesIO(packed[:-100])) as stream,
    ):
        stream.read()


GOOD = layer(
    folder("d"), member("d/f", b"content"), link("s", "d/f"), hard("h", "d/f"),
    member("big", noise(3000), pax_headers={"SCHILY.xattr.user.x": "y", "mtime": "1.5"}),
    member("d/.wh.x"), member("n" * 200, b"long"),
)  # fmt: skip


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=12),
    st.integers(0, len(GOOD)),
)
def test_a_damaged_archive_is_read_or_refused_and_nothing_else(
    store: Store, changes: list[tuple[int, int]], cut: int
) -> None:
    raw = bytearray(GOOD)
    for at, value in changes:
        raw[at] = value
    with ContentWriter(store) as writer:
        tree = LayeredTree(writer)
        try:
            tree.add_layer(io.BytesIO(bytes(raw[: cut or len(raw)])), "x")
            packed = b"".join(build_index(tree.root))
        except NagaraError:
            return
    assert b"".join(build_index(read_index(packed))) == packed


def test_gzip_layers_may_have_several_parts() -> None:
    raw = layer(member("a", b"x"))
    packed = gzip.compress(raw[:1000]) + gzip.compress(raw[1000:])
    with decompressed(io.BytesIO(packed)) as stream:
        assert stream.read() == raw
