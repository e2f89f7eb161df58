"""The bytes of the kernel's FUSE protocol, as far as read-only trees need it. Pure.

Format: linux/include/uapi/linux/fuse.h, protocol 7.31 and newer. Requests come from the kernel
only, but are checked all the same: a malformed one raises `WireError` and harms nobody.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

LOOKUP, FORGET, GETATTR, READLINK = 1, 2, 3, 5
OPEN, READ, STATFS, RELEASE = 14, 15, 17, 18
GETXATTR, LISTXATTR, FLUSH, INIT = 22, 23, 25, 26
OPENDIR, READDIR, RELEASEDIR, ACCESS = 27, 28, 29, 34
INTERRUPT, DESTROY, BATCH_FORGET, READDIRPLUS = 36, 38, 42, 44
SILENT = (FORGET, BATCH_FORGET)  # never answered

ROOT = 1
MAX_READ_BYTES = 1 << 20
MAX_PAGES = MAX_READ_BYTES // 4096
REQUEST_BYTES = 1 << 17  # the kernel refuses to fill buffers below max_write + headers
FOREVER = (1 << 32) - 1  # seconds: nothing here ever changes
_MAX_WRITE = 65536

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_HEAD = struct.Struct("<QII")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_STORE_OUT = struct.Struct("<QQI4x")
_OPEN_OUT = struct.Struct("<QIi")
_READ_IN = struct.Struct("<QQI")
_INTERRUPT_IN = struct.Struct("<Q")
_XATTR_IN = struct.Struct("<I")
_STATFS = struct.Struct("<QQQQQIII28x")
_DIRENT = struct.Struct("<QQII")
OUT_BYTES = _OUT.size

_ASYNC_READ, _PARALLEL_DIROPS, _CACHE_SYMLINKS = 1 << 0, 1 << 18, 1 << 23
_MAX_PAGES_FLAG, _EXPORT = 1 << 22, 1 << 4
_KEEP_CACHE, _CACHE_DIR, _NOFLUSH = 2, 8, 32
_NOTIFY_STORE, _NOTIFY_RESEND = 4, 7
_MAJOR, _LEAST_MINOR, _OUR_MINOR = 7, 31, 41


class WireError(Exception):
    """The bytes are no request of this protocol."""


class Request(NamedTuple):
    """One request of the kernel. `body` is what follows the header."""

    operation: int
    unique: int
    node: int
    pid: int  # of the asking thread as the mounter sees it; 0 when it cannot be seen
    body: bytes


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat shows of a node."""

    node: int
    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    mtime_ns: int = 0


def parse_request(raw: bytes) -> Request:
    """Raises `WireError`."""
    if len(raw) < _IN.size:
        raise WireError("a request without a whole header")
    length, operation, unique, node, _, _, pid, _, _ = _IN.unpack_from(raw)
    if length != len(raw):
        raise WireError("a request of another length than it says")
    return Request(operation, unique, node, pid, raw[_IN.size :])


def name_in(request: Request) -> bytes:
    """The name that a LOOKUP asks for."""
    end = request.body.find(b"\0")
    if end <= 0:
        raise WireError("a name without an end")
    return request.body[:end]


def read_in(request: Request) -> tuple[int, int]:
    """(offset, length) of a READ or READDIR."""
    _, offset, length = _unpack(_READ_IN, request.body)
    if length > MAX_READ_BYTES or offset >= 1 << 63:
        raise WireError("a read that is too large")
    return offset, length


def xattr_in(request: Request) -> tuple[int, bytes]:
    """(room in bytes, name) of a GETXATTR; the name of a LISTXATTR is empty."""
    (room,) = _unpack(_XATTR_IN, request.body)
    return room, request.body[8:].rstrip(b"\0")


def interrupted_in(request: Request) -> int:
    """Which request an INTERRUPT is about."""
    (unique,) = _unpack(_INTERRUPT_IN, request.body)
    return int(unique)


def header(unique: int, size: int) -> bytes:
    """The header of an answer whose body has `size` bytes."""
    return _OUT.pack(_OUT.size + size, 0, unique)


def answer(unique: int, body: bytes = b"") -> bytes:
    return header(unique, len(body)) + body


def failure(unique: int, number: int) -> bytes:
    """An answer with an errno."""
    return _OUT.pack(_OUT.size, -number, unique)


def unique_of(answer: bytes | memoryview) -> int:
    """Which request an answer belongs to."""
    return int(_OUT.unpack_from(answer)[2])


def resend() -> bytes:
    """Asks the kernel to send again what the previous daemon had taken and not answered (6.9+)."""
    return _OUT.pack(_OUT.size, _NOTIFY_RESEND, 0)


def init_answer(request: Request) -> bytes:
    """What we can do, as far as the kernel can too. Never write-back: nothing is written here.

    Raises `WireError` for a protocol before 7.31 (Linux 5.4).
    """
    major, minor, _, offered = _unpack(_INIT_IN, request.body)
    if major != _MAJOR or minor < _LEAST_MINOR:
        raise WireError(f"FUSE protocol {major}.{minor} is too old")
    wanted = _ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES_FLAG | _CACHE_SYMLINKS | _EXPORT
    # INIT can only lower the read-ahead; the mounter raises it through the device's entry in sysfs.
    return answer(request.unique, _INIT_OUT.pack(
        _MAJOR, min(minor, _OUR_MINOR), (1 << 31) - 1, wanted & offered, 64, 48, _MAX_WRITE, 1,
        MAX_PAGES, 0, 0,
    ))  # fmt: skip


def attributes(unique: int, found: Attributes) -> bytes:
    return answer(unique, _ATTR_HEAD.pack(FOREVER, 0, 0) + _attr(found))


def entry(unique: int, found: Attributes) -> bytes:
    return answer(unique, _entry(found))


def opened(unique: int) -> bytes:
    """Keep what is cached, and do not tell us of closes: a close must never wait for a daemon."""
    return answer(unique, _OPEN_OUT.pack(0, _KEEP_CACHE | _NOFLUSH, 0))


def stored(node: int, offset: int, size: int) -> bytes:
    """What comes before so many bytes of a file that the kernel is to keep in its cache."""
    body = _STORE_OUT.pack(node, offset, size)
    return _OUT.pack(_OUT.size + len(body) + size, _NOTIFY_STORE, 0) + body


def opened_folder(unique: int) -> bytes:
    return answer(unique, _OPEN_OUT.pack(0, _KEEP_CACHE | _CACHE_DIR, 0))


def statfs(unique: int, files: int, size_bytes: int) -> bytes:
    return answer(unique, _STATFS.pack(-(-size_bytes // 4096), 0, 0, files, 0, 4096, 255, 4096))


def xattr_size(unique: int, size: int) -> bytes:
    return answer(unique, struct.pack("<II", size, 0))


def folder_entry(name: bytes, node: int, mode: int, following: int) -> bytes:
    """One entry of a READDIR; `following` is the offset that comes after it."""
    raw = _DIRENT.pack(node, following, len(name), mode >> 12 & 15) + name
    return raw + bytes(-len(raw) % 8)


def _entry(found: Attributes) -> bytes:
    return _ENTRY.pack(found.node, 0, FOREVER, FOREVER, 0, 0) + _attr(found)


def _attr(found: Attributes) -> bytes:
    seconds, nano = divmod(found.mtime_ns, 10**9)
    when = seconds & 0xFFFFFFFFFFFFFFFF
    return _ATTR.pack(
        found.node, found.size, -(-found.size // 512), when, when, when, nano, nano, nano,
        found.mode, found.nlink, found.uid, found.gid, _device(found.rdev), 4096, 0,
    )  # fmt: skip


def _device(rdev: int) -> int:
    major = rdev >> 8 & 0xFFF | rdev >> 32 & 0xFFFFF000
    minor = rdev & 0xFF | rdev >> 12 & 0xFFFFFF00
    return minor & 0xFF | (major & 0xFFF) << 8 | (minor & ~0xFF) << 12


def _unpack(form: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) < form.size:
        raise WireError("a request whose body is cut")
    return form.unpack_from(body)
