"""Layers of archives as one tree, in memory: nothing is ever extracted to the host.

A layer is a tar stream. Its members are put into a tree whose paths are looked up in that tree
and nowhere else: a parent that is a symbolic link leads to where it leads *inside* the tree (as
it would after a chroot), `..` above the root stays at the root. So there is no way out, only
wrong images.

Rules: the last of several members of one name wins; a folder over a folder keeps what is in it;
anything over anything else replaces it; a hard link may come before its target in the same
layer; whiteouts (`.wh.NAME`, `.wh..wh..opq`) hide what lower layers brought, never what their own
layer brings, wherever in it they stand. Blocking; belongs to one thread.
"""

import base64
import binascii
import decimal
import os
import stat
import tarfile
import urllib.parse
from typing import BinaryIO, cast

from nagara.base.errors import NagaraError
from nagara.image.compression import DAMAGED
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadArchiveError, ImageError
from nagara.image.tree import NAME_LIMIT, Node, Xattrs, check_node, new_folder, printable

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_LINKS_FOLLOWED = 40
_DEPTH_LIMIT = 1024
_MEMBERS_LIMIT = 20_000_000
_XATTR = "SCHILY.xattr."
_XATTR_ENCODED = "LIBARCHIVE.xattr."
_TYPES = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.AREGTYPE: stat.S_IFREG,
    tarfile.CONTTYPE: stat.S_IFREG,
    tarfile.GNUTYPE_SPARSE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}
# What the standard library lets through when an archive is malformed, beside OSError.
MALFORMED = (*DAMAGED, tarfile.TarError, OverflowError, MemoryError, KeyError, IndexError,
             AttributeError, TypeError, RecursionError)  # fmt: skip


class LayeredTree:
    """A tree being made from layers, the lowest first."""

    def __init__(self, writer: ContentWriter) -> None:
        self.root = new_folder()
        self._writer = writer
        self._layer = _Layer(self.root)

    def add_layer(self, stream: BinaryIO, where: str) -> None:
        """Puts one uncompressed tar stream on top of what is there.

        Raises:
            BadArchiveError: it is malformed, or means to leave the tree.
            UnrepresentableError: names what no image can hold.
        """
        self._layer = _Layer(self.root)
        try:
            with tarfile.open(
                fileobj=stream, mode="r|", format=tarfile.PAX_FORMAT, errors="surrogateescape"
            ) as archive:
                for count, member in enumerate(archive):
                    if count > _MEMBERS_LIMIT:
                        raise BadArchiveError("has too many members", where=where)
                    self._add(archive, member)
                    archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
            self._link_late()
        except NagaraError:
            raise
        except OSError as error:
            raise BadArchiveError(f"cannot be read: {error}", where=where) from error
        except MALFORMED as error:
            said = f"is no archive of files: {type(error).__name__}: {error}"
            raise BadArchiveError(said[:200], where=where) from error

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(os.fsencode(member.name))
        if not parts:
            self._set_root(member)
            return
        name = parts[-1]
        if len(name) > NAME_LIMIT:
            raise BadArchiveError(f"a name of {len(name)} bytes", where=printable(name))
        parent = self._folder(parts[:-1])
        if name.startswith(_WHITEOUT):
            self._white_out(parent, name)
            return
        if member.islnk():
            self._layer.late.append((parent, name, _parts(os.fsencode(member.linkname))))
            self._try_link(*self._layer.late[-1], is_last_chance=False)
            return
        node = _node(member)
        check_node(node, b"/".join(parts))
        if stat.S_ISREG(node.mode):
            self._fill(archive, member, node)
        self._put(parent, name, node)

    def _set_root(self, member: tarfile.TarInfo) -> None:
        if not member.isdir():
            raise BadArchiveError("the root of an image has to be a folder", where=member.name)
        found = _node(member)
        root = self.root
        root.mode, root.uid, root.gid = found.mode, found.uid, found.gid
        root.mtime_ns, root.xattrs = found.mtime_ns, found.xattrs

    def _put(self, parent: Node, name: bytes, node: Node) -> None:
        assert parent.kids is not None
        old = parent.kids.get(name)
        if node.is_folder and old is not None and old.is_folder:
            node.kids = old.kids
            self._layer.inherit(old, node)
        parent.kids[name] = node
        self._layer.brought.add((parent, name))
        self._layer.forget_late(parent, name)

    def _fill(self, archive: tarfile.TarFile, member: tarfile.TarInfo, node: Node) -> None:
        stream = archive.extractfile(member)
        if stream is None:
            raise BadArchiveError("a file without content", where=member.name)
        source = cast("BinaryIO", stream)
        extents = None
        if member.sparse is not None:
            # The object below the buffer: only it can skip forward in a stream.
            source = cast("BinaryIO", stream.raw)  # type: ignore[attr-defined]
            parts = cast("list[tuple[int, int]]", member.sparse)
            extents = [(start, length) for start, length in parts if length]
            _check_extents(extents, member)
        try:
            self._writer.add_stream(node, source, member.size, extents)
        except ImageError as error:
            raise BadArchiveError(error.what, where=member.name) from error

    def _white_out(self, parent: Node, name: bytes) -> None:
        if name == _OPAQUE:
            self._hide_lower(parent)
        elif not name.startswith(_WHITEOUT * 2):  # others are another tool's notes
            hidden = name[len(_WHITEOUT) :]
            if not hidden or hidden in (b".", b".."):
                raise BadArchiveError("a whiteout of nothing", where=printable(name))
            self._hide(parent, hidden)

    def _hide(self, parent: Node, name: bytes) -> None:
        assert parent.kids is not None
        kid = parent.kids.get(name)
        if kid is None:
            return
        if (parent, name) not in self._layer.brought:
            del parent.kids[name]
        elif kid.is_folder:
            self._hide_lower(kid)

    def _hide_lower(self, folder: Node) -> None:
        """Takes away what lower layers brought into a folder, at any depth."""
        pending = [folder]
        while pending:
            here = pending.pop()
            assert here.kids is not None
            for name in list(here.kids):
                kid = here.kids[name]
                if (here, name) not in self._layer.brought:
                    del here.kids[name]
                elif kid.is_folder:
                    pending.append(kid)

    def _folder(self, parts: list[bytes]) -> Node:
        """The folder at a path, made if need be; links in it lead inside the tree."""
        stack = [self.root]
        pending = parts[::-1]
        followed = 0
        while pending:
            name = pending.pop()
            here = stack[-1]
            assert here.kids is not None
            if name in (b"", b"."):
                continue
            if name == b"..":
                if len(stack) > 1:
                    stack.pop()
                continue
            kid = here.kids.get(name)
            if kid is not None and kid.target is not None:
                followed += 1
                if followed > _LINKS_FOLLOWED:
                    raise BadArchiveError("links that lead in a circle", where=printable(name))
                if kid.target.startswith(b"/"):
                    stack = [self.root]
                pending += kid.target.split(b"/")[::-1]
                continue
            if kid is None or not kid.is_folder:
                kid = new_folder()
                self._put(here, name, kid)
            stack.append(kid)
            if len(stack) > _DEPTH_LIMIT:
                raise BadArchiveError("folders too deep", where=printable(name))
        return stack[-1]

    def _try_link(
        self, parent: Node, name: bytes, target: list[bytes], *, is_last_chance: bool
    ) -> bool:
        found = self._find(target)
        if found is None or found.is_folder:
            if not is_last_chance:
                return False
            what = "to nothing" if found is None else "to a folder"
            where = f"{printable(name)} → {printable(b'/'.join(target))}"
            raise BadArchiveError(f"a hard link {what}", where=where)
        assert parent.kids is not None
        if parent.kids.get(name) is not found:
            self._put(parent, name, found)
        else:  # to itself: it stays, and is this layer's now
            self._layer.brought.add((parent, name))
        self._layer.forget_late(parent, name)
        return True

    def _find(self, parts: list[bytes]) -> Node | None:
        """What a hard link means: the last part is not followed."""
        if not parts or self._exists(parts[:-1]) is None:
            return None
        parent = self._folder(parts[:-1])
        assert parent.kids is not None
        return parent.kids.get(parts[-1])

    def _exists(self, parts: list[bytes]) -> Node | None:
        """Like `_folder`, but makes nothing."""
        here = [self.root]
        pending = parts[::-1]
        followed = 0
        while pending:
            name = pending.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                here = here[:-1] or here
                continue
            kid = (here[-1].kids or {}).get(name)
            if kid is not None and kid.target is not None:
                followed += 1
                if followed > _LINKS_FOLLOWED:
                    return None
                if kid.target.startswith(b"/"):
                    here = [self.root]
                pending += kid.target.split(b"/")[::-1]
            elif kid is None or not kid.is_folder:
                return None
            else:
                here.append(kid)
        return here[-1]

    def _link_late(self) -> None:
        """Hard links that came before their targets; some wait for one another."""
        while self._layer.late:
            waiting = list(self._layer.late)
            if not any(self._try_link(*link, is_last_chance=False) for link in waiting):
                self._try_link(*waiting[0], is_last_chance=True)


class _Layer:
    """What one layer has brought so far."""

    def __init__(self, root: Node) -> None:
        self.brought: set[tuple[Node, bytes]] = set()
        self.late: list[tuple[Node, bytes, list[bytes]]] = []
        self._root = root

    def inherit(self, old: Node, new: Node) -> None:
        """A folder's node was replaced by one with the same entries."""
        if old is new or not self.brought:
            return
        assert new.kids is not None
        moved = [name for name in new.kids if (old, name) in self.brought]
        self.brought -= {(old, name) for name in moved}
        self.brought |= {(new, name) for name in moved}
        self.late = [
            (new if parent is old else parent, name, target) for parent, name, target in self.late
        ]

    def forget_late(self, parent: Node, name: bytes) -> None:
        """A later member of the same name, or the link itself, has come."""
        if self.late:
            self.late = [link for link in self.late if link[0] is not parent or link[1] != name]


def _parts(path: bytes) -> list[bytes]:
    """A member's path below the root. Raises `BadArchiveError` for one that climbs."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise BadArchiveError("a path that climbs out of its folder", where=printable(path))
    if any(b"\0" in part for part in parts) or len(parts) > _DEPTH_LIMIT:
        raise BadArchiveError("a path that cannot be one", where=printable(path[:200]))
    return parts


def _node(member: tarfile.TarInfo) -> Node:
    kind = _TYPES.get(member.type)
    if kind is None:
        raise BadArchiveError(f"a member of the unknown type {member.type!r}", where=member.name)
    node = Node(
        kind | (member.mode & 0o7777),
        uid=member.uid,
        gid=member.gid,
        mtime_ns=_mtime_ns(member),
        xattrs=_xattrs(member),
    )
    if kind == stat.S_IFDIR:
        node.kids = {}
    elif kind == stat.S_IFLNK:
        node.target = os.fsencode(member.linkname)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        if not (0 <= member.devmajor < 1 << 12 and 0 <= member.devminor < 1 << 20):
            raise BadArchiveError("a device whose number cannot be one", where=member.name)
        node.rdev = os.makedev(member.devmajor, member.devminor)
    return node


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """Exactly as it is written: a float would lose the last digits."""
    try:
        written = decimal.Decimal(member.pax_headers.get("mtime", str(member.mtime)))
        return int((written * 10**9).to_integral_value(decimal.ROUND_FLOOR))
    except (decimal.InvalidOperation, ValueError, OverflowError):
        raise BadArchiveError("a time that is none", where=member.name) from None


def _xattrs(member: tarfile.TarInfo) -> Xattrs:
    found: dict[bytes, bytes] = {}
    for key, value in member.pax_headers.items():
        try:
            if key.startswith(_XATTR_ENCODED):
                name = urllib.parse.unquote_to_bytes(key[len(_XATTR_ENCODED) :])
                found.setdefault(name, base64.b64decode(value + "=" * (-len(value) % 4)))
            elif key.startswith(_XATTR):
                name = key[len(_XATTR) :].encode("utf-8", "surrogateescape")
                found[name] = value.encode("utf-8", "surrogateescape")
        except (binascii.Error, UnicodeError) as error:
            raise BadArchiveError(
                f"an attribute that is none: {error}", where=member.name
            ) from None
    return tuple(sorted(found.items()))


def _check_extents(extents: list[tuple[int, int]], member: tarfile.TarInfo) -> None:
    end = 0
    for start, length in extents:
        if start < end or length < 0 or start + length > member.size:
            raise BadArchiveError("a sparse file whose parts overlap", where=member.name)
        end = start + length
