"""Reads from /proc what `preflight` decides about. Blocking, some milliseconds per process."""

import os
import re
import stat
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from nagara.snapshot.preflight import (
    SHARED_NAMESPACES,
    Connection,
    Descriptor,
    Process,
    ReplicaFacts,
)
from nagara.snapshot.unlisted_sockets import own_unlisted

# See proc(5): "lock:  1: POSIX  ADVISORY  WRITE 12 fe:00:345 0 EOF"
_LOCK = re.compile(r"^lock:\s+\d+: POSIX\s+\w+\s+(\w+)", re.MULTILINE)
_FLAGS = re.compile(r"^flags:\s+([0-7]+)", re.MULTILINE)
_HEAD_BYTES = 20
_WATCH = re.compile(r"^inotify .*\bsdev:([0-9a-f]+)", re.MULTILINE)
_ESTABLISHED, _CLOSE_WAIT = "01", "08"
_TCP_TABLES = ("tcp", "tcp6")
# Tables of /proc/PID/net with the column of the inode.
_SOCKET_TABLES = {
    **dict.fromkeys(("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6"), 9),
    "unix": 6, "netlink": 9, "packet": 8, "icmp": 9, "icmp6": 9,
}  # fmt: skip
_KERNEL_MINOR_BITS = 20
_SECTOR_BYTES = 512


def read_replica_facts(init_pid: int) -> ReplicaFacts:
    """The facts of the replica whose first process is `init_pid`.

    What ends meanwhile is left out. Raises OSError when the first process has ended.
    """
    Path(f"/proc/{init_pid}/ns/pid").readlink()
    processes = tuple(_process(pid) for pid in _family(init_pid))
    owned = {
        int(descriptor.target[8:-1])
        for process in processes
        for descriptor in process.descriptors
        if descriptor.target.startswith("socket:[")
    }
    net = Path(f"/proc/{init_pid}/net")
    listed = frozenset(_sockets(net))
    unlisted = own_unlisted([process.pid for process in processes], owned - listed)
    return ReplicaFacts(
        processes,
        _filesystems(init_pid),
        listed.union(unlisted),
        tuple(_outside_connections(net, owned)),
    )


def _family(pid: int) -> Iterator[int]:
    """The process and all that descend from it: the tree that the checkpoint tool follows."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _text(children).split():
            yield from _family(int(child))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # ended meanwhile, or the kernel lacks the table
        return ""


def _process(pid: int) -> Process:
    status = dict(
        line.split(":\t", 1) for line in _text(Path(f"/proc/{pid}/status")).splitlines()
        if ":\t" in line
    )  # fmt: skip
    return Process(
        pid,
        status.get("Name", "?"),
        (*_descriptors(pid), *_deleted_maps(pid)),
        dict(_namespaces(pid)),
        int(status.get("TracerPid", 0)),
    )


def _namespaces(pid: int) -> Iterator[tuple[str, str]]:
    for kind in SHARED_NAMESPACES:
        try:
            yield kind, str(Path(f"/proc/{pid}/ns/{kind}").readlink())
        except OSError:  # ended meanwhile, or not in this kernel
            continue


def _descriptors(pid: int) -> Iterator[Descriptor]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names only
    except OSError:
        return
    mapped = _mapped_names(pid)
    for number in numbers:
        path = Path(f"/proc/{pid}/fd/{number}")
        try:
            target, state = str(path.readlink()), path.stat()
        except OSError:  # closed meanwhile
            continue
        is_device = stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode)
        watches: tuple[tuple[int, int], ...] = ()
        locks: tuple[str, ...] = ()
        head = b""
        if target == "anon_inode:inotify":
            info = _text(Path(f"/proc/{pid}/fdinfo/{number}"))
            watches = tuple({_kernel_device(int(found, 16)) for found in _WATCH.findall(info)})
        elif stat.S_ISREG(state.st_mode):
            info = _text(Path(f"/proc/{pid}/fdinfo/{number}"))
            locks = tuple(_LOCK.findall(info))
            head = _head(path) if _is_for_writing(info) else b""
        yield Descriptor(
            target,
            _device(state.st_rdev) if is_device else None,
            _device(state.st_dev),
            state.st_nlink,
            state.st_blocks * _SECTOR_BYTES,
            watches,
            locks,
            is_mapped=bool(locks) and target in mapped,
            head=head,
        )


def _is_for_writing(info: str) -> bool:
    flags = _FLAGS.search(info)
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # deleted, closed meanwhile, or not to be read
        return b""


def _mapped_names(pid: int) -> frozenset[str]:
    lines = (line.split(maxsplit=5) for line in _text(Path(f"/proc/{pid}/maps")).splitlines())
    return frozenset(fields[5] for fields in lines if len(fields) == 6)


def _deleted_maps(pid: int) -> Iterator[Descriptor]:
    """Mapped files that have lost the name they were opened by."""
    for line in _text(Path(f"/proc/{pid}/maps")).splitlines():
        if not line.endswith(" (deleted)"):
            continue
        place, _, _, _, _, target = line.split(maxsplit=5)
        # Without the leading zeros that `maps` may write.
        name = "-".join(f"{int(end, 16):x}" for end in place.split("-"))
        try:
            state = Path(f"/proc/{pid}/map_files/{name}").stat()
        except OSError:  # unmapped meanwhile
            continue
        yield Descriptor(
            target,
            filesystem=_device(state.st_dev),
            links=state.st_nlink,
            stored_bytes=state.st_blocks * _SECTOR_BYTES,
        )


def _device(number: int) -> tuple[int, int]:
    return os.major(number), os.minor(number)


def _kernel_device(number: int) -> tuple[int, int]:
    """A device number as the kernel holds it, which is not as system calls tell it."""
    return number >> _KERNEL_MINOR_BITS, number & ((1 << _KERNEL_MINOR_BITS) - 1)


def _filesystems(pid: int) -> dict[tuple[int, int], str]:
    """See proc_pid_mountinfo(5): after the dash stands the kind."""
    found = {}
    for line in _text(Path(f"/proc/{pid}/mountinfo")).splitlines():
        fields = line.split()
        major, _, minor = fields[2].partition(":")
        found[int(major), int(minor)] = fields[fields.index("-") + 1]
    return found


def _sockets(net: Path) -> Iterator[int]:
    for table, column in _SOCKET_TABLES.items():
        for line in _text(net / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > column and fields[column].isdigit():
                yield int(fields[column])


def _outside_connections(net: Path, owned: set[int]) -> Iterator[Connection]:
    """Open connections with exactly one end in a process of the replica."""
    ends = {}
    for table in _TCP_TABLES:
        for line in _text(net / table).splitlines()[1:]:
            _, local, remote, state, *_ = fields = line.split()
            if state in (_ESTABLISHED, _CLOSE_WAIT):
                ends[_address(local), _address(remote)] = int(fields[9])
    for (local, remote), inode in ends.items():
        if inode in owned and ends.get((remote, local)) not in owned:
            yield Connection(local, remote)


def _address(text: str) -> str:
    """`0100007F:1F90` → `127.0.0.1:8080`: words in the machine's byte order, here little-endian."""
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    if len(raw) == 4:
        return f"{IPv4Address(raw)}:{int(port, 16)}"
    address = IPv6Address(raw)
    plain = address.ipv4_mapped or address
    return f"{plain}:{int(port, 16)}" if address.ipv4_mapped else f"[{plain}]:{int(port, 16)}"
