"""What prevents a replica from being saved, and what is lost though it can be. Pure.

The checkpoint tool would say it too, but by the name of its own function and after seconds of
writing. Each kind here was seen to fail (or to be lost) with CRIU 4.2; what the tool can save,
such as a deleted file, a lock, a pair of terminals or a connection inside the replica, is not
mentioned.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# Kinds of namespaces of which all processes of a replica must share one.
SHARED_NAMESPACES = ("pid", "user", "time", "cgroup")
# Device files that every process may have: the tool opens them anew.
_HARMLESS_DEVICES = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0)})
_TERMINALS, _MULTIPLEXER = range(136, 144), (5, 2)
# Kernel objects behind a descriptor that the tool knows.
_SAVED_OBJECTS = frozenset(
    {"inotify", "[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[fanotify]", "[pidfd]"}
)
_SQLITE, _ROLLBACK_JOURNAL = b"SQLite format 3\0", b"\x01"  # see sqlite.org/fileformat
_OBJECT_ADVICE = {
    "[io_uring]": "make the server use epoll (libuv: UV_USE_IO_URING=0; others have a setting)",
    "[userfaultfd]": "switch off what pages memory itself",
    "[perf_event]": "do not profile the replica that is saved",
}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An open or mapped file of a process, as /proc shows it.

    `device` is what a device file stands for, `filesystem` where the file lies, both as (major,
    minor); `watches` are the file systems that an inotify watches; `locks` the kinds (READ, WRITE)
    of POSIX locks the process has on the file, `is_mapped` whether it maps it too; `head` are the
    first bytes of a file open for writing.
    """

    target: str
    device: tuple[int, int] | None = None
    filesystem: tuple[int, int] = (0, 0)
    links: int = 1
    stored_bytes: int = 0
    watches: tuple[tuple[int, int], ...] = ()
    locks: tuple[str, ...] = ()
    is_mapped: bool = False
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a replica. `namespaces`: kind → identity."""

    pid: int
    name: str
    descriptors: tuple[Descriptor, ...] = ()
    namespaces: Mapping[str, str] | None = None
    tracer: int = 0


@dataclass(frozen=True, slots=True)
class Connection:
    """An open TCP connection of the replica whose other end is not one of its own processes."""

    local: str
    remote: str


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """A replica's processes, the first one first, and what surrounds them.

    `sockets` are the inodes of all sockets in its network namespace; `filesystems` are those
    mounted in it: (major, minor) → kind.
    """

    processes: Sequence[Process]
    filesystems: Mapping[tuple[int, int], str]
    sockets: frozenset[int] = frozenset()
    connections: tuple[Connection, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something the tool cannot save (`prevents`), or leaves out."""

    kind: str
    what: str
    hint: str
    prevents: bool = True

    def __str__(self) -> str:
        return f"{self.what} ({self.kind})"


def findings(facts: ReplicaFacts, *, ghost_limit_bytes: int) -> tuple[Finding, ...]:
    """All that stands in the way, each kind once per process, what prevents first.

    Args:
        ghost_limit_bytes: how much of a deleted file the tool carries.
    """
    found: dict[tuple[str, int], Finding] = {}
    holders = Counter(
        target
        for process in facts.processes
        for target in {descriptor.target for descriptor in process.descriptors}
    )
    for process in facts.processes:
        for descriptor in process.descriptors:
            if descriptor.locks and descriptor.is_mapped:
                finding = _lost_lock(process, descriptor, holders[descriptor.target])
                found.setdefault((f"{finding.kind} {descriptor.target}", process.pid), finding)
        for finding in _of_process(process, facts, ghost_limit_bytes):
            found.setdefault((finding.kind, process.pid), finding)
    lost = [_lost_connection(connection) for connection in facts.connections]
    return tuple(sorted([*found.values(), *lost], key=lambda finding: not finding.prevents))


def _of_process(process: Process, facts: ReplicaFacts, ghost_limit_bytes: int) -> Iterator[Finding]:
    who = f"process {process.pid} ({process.name})"
    if process.tracer:
        yield Finding(
            "traced",
            f"{who} is traced by process {process.tracer}",
            "end the debugger or tracer before the snapshot",
        )
    first = facts.processes[0].namespaces or {}
    own = process.namespaces or {}
    for kind in SHARED_NAMESPACES:
        if kind in own and kind in first and own[kind] != first[kind]:
            yield Finding(
                "namespace",
                f"{who} is in a {kind} namespace of its own",
                f"run it without one (an inner sandbox or container makes {kind} namespaces)",
            )
    for descriptor in process.descriptors:
        yield from _of_descriptor(who, descriptor, facts, ghost_limit_bytes)


def _of_descriptor(
    who: str, descriptor: Descriptor, facts: ReplicaFacts, ghost_limit_bytes: int
) -> Iterator[Finding]:
    target = descriptor.target
    if target.startswith("anon_inode:"):
        yield from _of_object(who, descriptor, facts)
    elif target.startswith("socket:["):
        inode = int(target.removeprefix("socket:[").removesuffix("]"))
        if facts.sockets and inode not in facts.sockets:
            yield Finding(
                "socket",
                f"{who} holds a socket that was made outside the replica, or of a kind such as "
                "MPTCP",
                "let the server make its own sockets, plain TCP ones (Go: GODEBUG=multipathtcp=0)",
            )
    elif descriptor.device is not None:
        yield from _of_device(who, descriptor, facts)
    elif target.endswith(" (deleted)") and descriptor.filesystem in facts.filesystems:
        is_carried = facts.filesystems[descriptor.filesystem] == "tmpfs"
        if descriptor.links == 0 or not is_carried:
            yield from _of_deleted(who, descriptor, ghost_limit_bytes)
    elif descriptor.head.startswith(_SQLITE) and descriptor.head[18:19] == _ROLLBACK_JOURNAL:
        yield Finding(
            "database",
            f"{who} has the SQLite database {target} open, whose library refuses to write once "
            "the file has another inode number, as it has in a clone",
            "use it with PRAGMA journal_mode = WAL, or close it in a before_snapshot hook",
        )


def _of_object(who: str, descriptor: Descriptor, facts: ReplicaFacts) -> Iterator[Finding]:
    kind = descriptor.target.removeprefix("anon_inode:")
    if kind not in _SAVED_OBJECTS:
        name = kind.strip("[]")
        advice = _OBJECT_ADVICE.get(kind, f"switch off what uses {name} in the server")
        yield Finding(name, f"{who} has an open {name}", advice)
    elif any(facts.filesystems.get(place) == "overlay" for place in descriptor.watches):
        yield Finding(
            "inotify",
            f"{who} watches files of its root with inotify, whose watches cannot be named again",
            "switch off watching for changed files (reload, auto-restart), or let it watch a "
            "folder below /dev/shm",
        )


def _of_device(who: str, descriptor: Descriptor, facts: ReplicaFacts) -> Iterator[Finding]:
    device = descriptor.device
    assert device is not None
    if device in _HARMLESS_DEVICES:
        return
    if device[0] in _TERMINALS or device == _MULTIPLEXER:
        if facts.filesystems.get(descriptor.filesystem) != "devpts":
            yield Finding(
                "terminal",
                f"{who} has the terminal {descriptor.target} of outside the replica open",
                "start the server without a terminal",
            )
        return
    yield Finding(
        "device file",
        f"{who} has the device {descriptor.target} open",
        "close it in a before_snapshot hook and open it again in after_restore",
    )


def _of_deleted(who: str, descriptor: Descriptor, ghost_limit_bytes: int) -> Iterator[Finding]:
    target = descriptor.target.removesuffix(" (deleted)")
    if descriptor.links > 0:
        yield Finding(
            "lost name",
            f"{who} has {target} open, which was deleted and has another name (link-remap)",
            "open files by a name that stays",
        )
    elif descriptor.stored_bytes > ghost_limit_bytes:
        mib = 1 << 20
        yield Finding(
            "deleted file",
            f"{who} has the deleted file {target} of {descriptor.stored_bytes // mib} MiB open; "
            f"up to {ghost_limit_bytes // mib} MiB of a deleted file (a ghost) are carried",
            "close it in a before_snapshot hook, or do not delete it while it is in use",
        )


def _lost_lock(process: Process, descriptor: Descriptor, holders: int) -> Finding:
    """A process loses its POSIX locks on a file when it closes any descriptor of it, and the tool
    opens and closes mapped files after it has taken the locks again."""
    is_shared = holders > 1 or "WRITE" in descriptor.locks
    return Finding(
        "lock",
        f"process {process.pid} ({process.name}) has a lock on {descriptor.target}, which it maps "
        "as well; the lock does not come back",
        "SQLite with WAL: end transactions before the snapshot, and let one process alone have the "
        "database open; else close it in a before_snapshot hook",
        prevents=is_shared,
    )


def _lost_connection(connection: Connection) -> Finding:
    return Finding(
        "outside connection",
        f"the connection {connection.local} → {connection.remote} leads out of the replica and "
        "is closed in each one put back",
        "the server must connect again by itself, or in an after_restore hook",
        prevents=False,
    )
