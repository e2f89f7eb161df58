"""Extended attributes as an index stores them, and back. Pure.

Attributes of an image whose names begin with `trusted.overlay.` would be orders to our own
overlay; they are stored as `trusted.overlay.overlay.`, which the kernel (6.7 or newer) shows
without the second `overlay.` and does not obey. Format: linux/fs/erofs/erofs_fs.h,
struct erofs_xattr_ibody_header and erofs_xattr_entry.
"""

import struct

from nagara.image.errors import BadIndexError, UnrepresentableError
from nagara.image.tree import Xattrs, printable
from nagara.store.names import ObjectName

METACOPY = b"trusted.overlay.metacopy"
REDIRECT = b"trusted.overlay.redirect"
OPAQUE = b"trusted.overlay.opaque"
_OURS = b"trusted.overlay."
_ESCAPED = b"trusted.overlay.overlay."
_HEADER_BYTES = 12
_ENTRY = struct.Struct("<BBH")
_WHOLE = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}
_PREFIXES = ((b"user.", 1), (b"trusted.", 4), (b"security.", 6))
_NAMES = {2: b"system.posix_acl_access", 3: b"system.posix_acl_default"}
_BY_INDEX = {index: prefix for prefix, index in _PREFIXES}
_BODY_LIMIT = 65535 * 4
_REDIRECT_REST = REDIRECT.removeprefix(b"trusted.")
_METACOPY_ENTRY = _ENTRY.pack(len(METACOPY) - 8, 4, 0) + METACOPY.removeprefix(b"trusted.")
_POINTER_HEAD = bytes(_HEADER_BYTES) + _METACOPY_ENTRY + bytes((len(_REDIRECT_REST), 4))
_POINTER_LENGTH_AT = len(_POINTER_HEAD)


def escaped(xattrs: Xattrs) -> Xattrs:
    """An image's attributes as they are stored."""
    if not any(name.startswith(_OURS) for name, _ in xattrs):
        return xattrs
    return tuple(
        (_ESCAPED + name[len(_OURS) :] if name.startswith(_OURS) else name, value)
        for name, value in xattrs
    )


def unescaped(xattrs: Xattrs) -> Xattrs:
    """Stored attributes as the image had them; ours are left out."""
    if len(xattrs) == 2 and xattrs[0][0] == METACOPY and xattrs[1][0] == REDIRECT:
        return ()
    return tuple(
        (_OURS + name[len(_ESCAPED) :] if name.startswith(_ESCAPED) else name, value)
        for name, value in xattrs
        if not name.startswith(_OURS) or name.startswith(_ESCAPED)
    )


def encode(xattrs: Xattrs, content: ObjectName | None = None) -> bytes:
    """The body behind an inode.

    Args:
        content: what overlay shall take the file's bytes from.

    Raises:
        UnrepresentableError: names the attribute.
    """
    pointer = b"" if content is None else _pointer(content)
    if not xattrs:
        return bytes(_HEADER_BYTES) + pointer if pointer else b""
    parts = [bytes(_HEADER_BYTES)]
    for name, value in xattrs:
        if name in _WHOLE:
            index, rest = _WHOLE[name], b""
        else:
            found = next(((p, i) for p, i in _PREFIXES if name.startswith(p)), None)
            if found is None or len(name) == len(found[0]):
                raise UnrepresentableError(
                    f"the extended attribute {printable(name)} cannot be kept"
                )
            index, rest = found[1], name[len(found[0]) :]
        entry = _ENTRY.pack(len(rest), index, len(value)) + rest + value
        parts.append(entry + bytes(-len(entry) % 4))
    body = b"".join(parts) + pointer
    if len(body) > _BODY_LIMIT:
        raise UnrepresentableError("the extended attributes are too large together")
    return body


def _pointer(content: ObjectName) -> bytes:
    """`METACOPY` and `REDIRECT` as entries; written for almost every file."""
    place = b"/" + str(content).encode()
    entry = _METACOPY_ENTRY + _ENTRY.pack(len(_REDIRECT_REST), 4, len(place))
    entry += _REDIRECT_REST + place
    return entry + bytes(-len(entry) % 4)


def pointed_to(body: bytes) -> bytes | None:
    """Where the bytes of a plain file are: for a body that is a pointer and nothing else.

    A short cut for what nearly every file has; None for anything that has to be decoded.
    """
    if not body.startswith(_POINTER_HEAD):
        return None
    length = int.from_bytes(body[_POINTER_LENGTH_AT : _POINTER_LENGTH_AT + 2], "little")
    start = len(_POINTER_HEAD) + 2 + len(_REDIRECT_REST)
    end = start + length
    if body[start - len(_REDIRECT_REST) : start] != _REDIRECT_REST or end + -end % 4 != len(body):
        return None
    return body[start:end]


def decode(body: bytes) -> Xattrs:
    """The inverse of `encode`. Raises `BadIndexError`."""
    found = []
    at = _HEADER_BYTES
    if body[4:5] not in (b"", b"\0"):
        raise BadIndexError("shared extended attributes are not used here")
    while at < len(body):
        if at + _ENTRY.size > len(body):
            raise BadIndexError("an extended attribute is cut")
        name_bytes, index, value_bytes = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        end = at + name_bytes + value_bytes
        if end > len(body):
            raise BadIndexError("an extended attribute is cut")
        rest, value = body[at : at + name_bytes], body[at + name_bytes : end]
        if index in _NAMES and not rest:
            name = _NAMES[index]
        elif index in _BY_INDEX and rest:
            name = _BY_INDEX[index] + rest
        else:
            raise BadIndexError("an extended attribute of an unknown kind")
        found.append((name, value))
        at = end + -end % 4
    return tuple(found)
