"""What cannot be saved is named by what it is, with what to do; what can be is not complained of.

Each case is a real process in a real container. Some are only possible with more rights than a
replica has, or with something handed in from outside: there the test takes the fence away first.
"""

import asyncio
import os
import pty
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from nagara.contract.replica import CaptureReport, StartKind
from nagara.sandbox import bundle
from nagara.sandbox.netns import NetworkNamespace
from nagara.sandbox.unix_socket import connect

from .conftest import Yard, processes_naming

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# Takes what the test hands in, before it serves.
HANDED = """
import array, socket
door = socket.socket(socket.AF_UNIX); door.bind("/srv/door"); door.listen()
guest, _ = door.accept()
handed = socket.recv_fds(guest, 1, 4)[1]
guest.close(); door.close()
"""
RING = "import ctypes; ring = ctypes.CDLL(None).syscall(425, 8, (ctypes.c_byte * 120)())\n"
RING += "assert ring >= 0"
NESTED = """
import ctypes, os, time
if os.fork() == 0:
    assert ctypes.CDLL(None).unshare(0x20000000) == 0
    os.fork()  # the child is in the new namespace
    while True: time.sleep(1000)
time.sleep(0.3)
"""
TRACED = """
import ctypes, os, time
child = os.fork()
if child == 0:
    while True: time.sleep(1000)
assert ctypes.CDLL(None).ptrace(0x4206, child, 0, 0) == 0
"""
WATCH = """
import ctypes, os
watch = ctypes.CDLL(None).inotify_init1(0x800)
assert ctypes.CDLL(None).inotify_add_watch(watch, {folder!r}, 0x100) >= 0
"""


async def hand_in(yard: Yard, name: str, descriptor: int) -> None:
    """Passes a descriptor of ours to a replica that waits for it."""
    while True:
        for pid in processes_naming(name, exact=True):
            try:
                guest = connect(Path(f"/proc/{pid}/root/srv/door"), timeout_s=5)
            except OSError:
                continue
            with guest:
                socket.send_fds(guest, [b"x"], [descriptor])
            return
        await asyncio.sleep(0.02)


async def captured_with(yard: Yard, app: str, descriptor: int) -> CaptureReport:
    name = yard.name()
    spec = yard.spec(app=app, env={"FIRST": HANDED})
    capturing = asyncio.ensure_future(yard.capture(spec, name))
    try:
        async with asyncio.timeout(20):
            await hand_in(yard, name, descriptor)
    finally:
        report = await capturing
    return report


def assert_named(yard: Yard, report: CaptureReport, kind: str, hint: str) -> None:
    assert report.snapshot is None
    assert report.reason is not None
    assert "cannot be saved: process " in report.reason
    assert f"({kind})" in report.reason
    assert hint in report.reason
    assert yard.leftovers() == []


async def test_an_open_io_uring(shared, monkeypatch):
    if int(Path("/proc/sys/kernel/io_uring_disabled").read_text()):
        pytest.skip("needs io_uring in the kernel")
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}
    monkeypatch.setattr(bundle, "SECCOMP_PROFILE", profile)
    report = await shared.capture(shared.spec(env={"FIRST": RING}))
    assert_named(shared, report, "io_uring", "epoll")


async def test_a_namespace_of_its_own(shared, monkeypatch):
    monkeypatch.setattr(bundle, "CAPABILITIES", (*bundle.CAPABILITIES, "CAP_SYS_ADMIN"))
    report = await shared.capture(shared.spec(env={"FIRST": NESTED}))
    assert_named(shared, report, "namespace", "inner sandbox")


async def test_a_traced_process(shared):
    report = await shared.capture(shared.spec(env={"FIRST": TRACED}))
    assert_named(shared, report, "traced", "debugger")


async def test_an_inotify_on_the_replicas_root(shared):
    first = WATCH.format(folder=b"/srv")
    report = await shared.capture(shared.spec(env={"FIRST": first}))
    assert_named(shared, report, "inotify", "/dev/shm")


async def test_an_inotify_on_tmpfs_is_saved_and_goes_on(shared):
    spec = shared.spec(app="watching", env={"FIRST": WATCH.format(folder=b"/dev/shm")})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    code = "open('/dev/shm/new', 'w').close(); answer = os.read(watch, 4096)[16:].decode()"
    assert (await shared.tell(report.replica, code)).rstrip("\0") == "new"
    await shared.stop(report.replica)


async def test_a_device_file(shared):
    device = os.open("/dev/loop-control", os.O_RDWR)
    try:
        report = await captured_with(shared, "device", device)
    finally:
        os.close(device)
    assert_named(shared, report, "device file", "before_snapshot")


async def test_a_terminal_of_outside(shared):
    master, slave = pty.openpty()
    try:
        report = await captured_with(shared, "terminal", slave)
    finally:
        os.close(master)
        os.close(slave)
    assert_named(shared, report, "terminal", "without a terminal")


async def test_a_pair_of_terminals_inside_is_saved_and_goes_on(shared):
    first = "import os; master, slave = os.openpty(); os.write(slave, b'kept')"
    spec = shared.spec(app="typing", env={"FIRST": first})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    assert await shared.tell(report.replica, "answer = os.read(master, 100).decode()") == "kept"
    await shared.stop(report.replica)


async def test_a_socket_of_outside(shared):
    with socket.socket() as outside:
        outside.bind(("127.0.0.1", 0))
        outside.listen()
        report = await captured_with(shared, "socket", outside.fileno())
    assert_named(shared, report, "socket", "its own sockets")


async def test_a_connection_to_the_outside_is_noted_and_closed_in_the_clone(shared, caplog):
    """It does not prevent the capture: servers connect again when they find it closed."""
    first = """
import socket, time
def connect():
    while True:
        try:
            return socket.create_connection(("127.0.0.1", 9999))
        except OSError:
            time.sleep(0.02)
outgoing = connect()
"""
    spec = shared.spec(app="calling", env={"FIRST": first})
    name = shared.name()
    capturing = asyncio.ensure_future(shared.capture(spec, name))
    with ExitStack() as undo:
        async with asyncio.timeout(20):
            while not (pids := processes_naming(name, exact=True)):
                await asyncio.sleep(0.02)
            namespace = NetworkNamespace.of_process(pids[0])
            undo.callback(namespace.close)
            listening = undo.enter_context(namespace.open_socket())
            listening.bind(("127.0.0.1", 9999))
            listening.listen()
            peer, _ = await asyncio.get_running_loop().sock_accept(listening)
            undo.enter_context(peer)
        assert (await capturing).reason is None
    assert "127.0.0.1:9999 leads out of the replica" in caplog.text
    report = await shared.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    code = """
try:
    answer = outgoing.recv(1).decode()
except OSError as error:
    answer = ""
"""
    assert await shared.tell(report.replica, code) == ""
    await shared.stop(report.replica)


async def test_connections_among_the_replicas_own_processes_are_closed_but_not_complained_of(
    shared, caplog
):
    first = """
import socket
listening = socket.create_server(("127.0.0.1", 9998))
one = socket.create_connection(("127.0.0.1", 9998)); other, _ = listening.accept()
one.sendall(b"before"); assert other.recv(6) == b"before"
"""
    spec = shared.spec(app="inner", env={"FIRST": first})
    assert (await shared.capture(spec)).reason is None
    assert "leads out" not in caplog.text
    report = await shared.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    code = """
def received(end):
    try:
        return end.recv(1).decode()
    except OSError:
        return ""
answer = [received(one), received(other)]
again = socket.create_connection(("127.0.0.1", 9998)); listening.accept()[0].sendall(b"new")
answer.append(again.recv(3).decode())
"""
    assert await shared.tell(report.replica, code) == ["", "", "new"]
    await shared.stop(report.replica)


async def test_a_mapped_file_of_the_root_that_lost_one_of_its_names(shared):
    first = """
import mmap, os
with open("/srv/one", "wb+") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
mapped = mmap.mmap(os.open("/srv/one", os.O_RDWR), 4096, access=mmap.ACCESS_WRITE)
os.link("/srv/one", "/srv/other"); os.unlink("/srv/one")
for number in range(3, 20):
    try: os.close(number)
    except OSError: pass
"""
    report = await shared.capture(shared.spec(env={"FIRST": first}))
    assert_named(shared, report, "lost name", "a name that stays")


async def test_semaphores_of_several_processes_are_saved_and_shared_in_each_clone(shared):
    first = """
import multiprocessing
context = multiprocessing.get_context("spawn")
lock = context.Lock()
lock.acquire()
"""
    spec = shared.spec(app="locking", env={"FIRST": first})
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(2)))
    code = """
answer = [lock.acquire(timeout=0.05)]
lock.release()
answer += [lock.acquire(timeout=5), sorted(os.listdir("/dev/shm"))]
"""
    for report in reports:
        assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
        held, free, names = await shared.tell(report.replica, code)
        assert (held, free) == (False, True)
        assert not any("link_remap" in name for name in names)
    await shared.stop(*(report.replica for report in reports))


DATABASE = """
import sqlite3
database = sqlite3.connect("/srv/my.db", isolation_level=None, check_same_thread=False)
database.execute("PRAGMA journal_mode = {mode}")
database.execute("CREATE TABLE notes (text TEXT)")
"""


async def test_an_open_sqlite_database_whose_library_would_refuse_to_write(shared):
    report = await shared.capture(shared.spec(env={"FIRST": DATABASE.format(mode="DELETE")}))
    assert_named(shared, report, "database", "journal_mode = WAL")


async def test_a_sqlite_transaction_whose_lock_would_be_lost(shared):
    first = DATABASE.format(mode="WAL") + "database.execute('BEGIN IMMEDIATE')"
    report = await shared.capture(shared.spec(env={"FIRST": first}))
    assert_named(shared, report, "lock", "end transactions")


async def test_a_sqlite_database_at_rest_is_saved_and_can_be_written(shared):
    spec = shared.spec(app="database", env={"FIRST": DATABASE.format(mode="WAL")})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    code = """
database.execute("INSERT INTO notes VALUES ('a note')")
answer = database.execute("SELECT text FROM notes").fetchall()
"""
    assert await shared.tell(report.replica, code) == [["a note"]]
    await shared.stop(report.replica)


async def test_a_lock_on_a_file_that_is_not_mapped_is_kept_in_the_clone(shared):
    first = """
import fcntl, os
held = open("/srv/held", "w"); fcntl.lockf(held, fcntl.LOCK_EX)
"""
    spec = shared.spec(app="posix-lock", env={"FIRST": first})
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    code = """
reading, writing = os.pipe()
if os.fork() == 0:
    try:
        fcntl.lockf(os.open("/srv/held", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(writing, b"free")
    except OSError:
        os.write(writing, b"held")
    os._exit(0)
answer = os.read(reading, 10).decode()
"""
    assert await shared.tell(report.replica, code) == "held"
    await shared.stop(report.replica)
