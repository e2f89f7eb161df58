"""What is said of a replica's facts; real processes are in the tests of the node."""

from nagara.snapshot.preflight import Connection, Descriptor, Process, ReplicaFacts, findings

OVERLAY, TMPFS, PTS = (0, 40), (0, 41), (0, 42)
PLACES = {OVERLAY: "overlay", TMPFS: "tmpfs", PTS: "devpts"}


def kinds(*processes: Process, **facts: object) -> list[tuple[str, bool]]:
    replica = ReplicaFacts(processes, PLACES, **facts)  # type: ignore[arg-type]
    return [(f.kind, f.prevents) for f in findings(replica, ghost_limit_bytes=1000)]


def holding(*descriptors: Descriptor, pid: int = 1) -> Process:
    return Process(pid, "server", descriptors)


def test_what_servers_usually_hold_is_not_complained_of() -> None:
    usual = holding(
        Descriptor("/dev/null", device=(1, 3)),
        Descriptor("/dev/urandom", device=(1, 9)),
        Descriptor("/dev/pts/0", device=(136, 0), filesystem=PTS),
        Descriptor("pipe:[7]"),
        Descriptor("socket:[8]"),
        Descriptor("anon_inode:[eventpoll]"),
        Descriptor("anon_inode:inotify", watches=(TMPFS,)),
        Descriptor("/srv/log", filesystem=OVERLAY),
        Descriptor("/srv/gone (deleted)", filesystem=OVERLAY, links=0, stored_bytes=1000),
        Descriptor("/dev/shm/sem.x (deleted)", filesystem=TMPFS, links=1),
        Descriptor("/memfd:x (deleted)", filesystem=(0, 1), links=0, stored_bytes=5000),
    )
    assert kinds(usual, sockets=frozenset({8})) == []


def test_each_kind_is_said_once_per_process() -> None:
    rings = (Descriptor("anon_inode:[io_uring]"),) * 3
    assert kinds(holding(*rings), holding(*rings, pid=2)) == [("io_uring", True)] * 2


def test_an_unknown_object_of_the_kernel_is_named_by_its_name() -> None:
    assert kinds(holding(Descriptor("anon_inode:kvm-vm"))) == [("kvm-vm", True)]


def test_what_is_only_lost_comes_after_what_prevents() -> None:
    process = holding(Descriptor("/dev/fuse", device=(10, 229)))
    connection = Connection("127.0.0.1:1", "10.0.0.1:5432")
    found = kinds(process, connections=(connection,))
    assert found == [("device file", True), ("outside connection", False)]


def test_a_deleted_file_counts_by_what_it_stores() -> None:
    large = Descriptor("/srv/x (deleted)", filesystem=OVERLAY, links=0, stored_bytes=1001)
    assert kinds(holding(large)) == [("deleted file", True)]


def test_namespaces_are_compared_with_those_of_the_first_process() -> None:
    first = Process(1, "server", namespaces={"pid": "a", "time": "b"})
    other = Process(2, "inner", namespaces={"pid": "c", "time": "b"})
    assert kinds(first, other) == [("namespace", True)]
    assert kinds(first, first) == []


def locked(kind: str, pid: int = 1) -> Process:
    return holding(Descriptor("/srv/db-shm", locks=(kind,), is_mapped=True), pid=pid)


def test_a_lock_on_a_mapped_file_prevents_only_where_somebody_relies_on_it() -> None:
    assert kinds(locked("READ")) == [("lock", False)]
    assert kinds(locked("WRITE")) == [("lock", True)]
    assert kinds(locked("READ"), locked("READ", 2)) == [("lock", True)] * 2
    assert kinds(holding(Descriptor("/srv/db", locks=("WRITE",)))) == []


def test_a_database_with_a_rollback_journal_prevents_and_one_with_wal_does_not() -> None:
    rollback, wal = (
        Descriptor("/srv/db", head=b"SQLite format 3\0\x10\x00" + bytes([mode, mode]))
        for mode in (1, 2)
    )
    assert kinds(holding(rollback)) == [("database", True)]
    assert kinds(holding(wal)) == []
