"""Replicas put back from one snapshot: what they carry over, and what they do not share."""

import asyncio

import pytest
import pytest_asyncio

from nagara.contract.replica import StartKind
from nagara.image.images import load_tree
from nagara.image.tree import walk

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# What the app does before it is saved.
FIRST = """
import fcntl, mmap, os, random, socket, ssl, threading, time, uuid
os.makedirs("/srv/app/cwd", exist_ok=True)
os.chdir("/srv/app/cwd")
log = open("/srv/app/open.log", "a"); log.write("before\\n"); log.flush()
gone = open("/srv/app/deleted", "w+"); gone.write("still here"); gone.flush()
os.unlink("/srv/app/deleted")
big = open("/srv/app/big-deleted", "wb+"); big.write(b"b" * (3 << 20)); big.flush()
os.unlink("/srv/app/big-deleted")
closed = open("/srv/app/closed", "w"); closed.write("closed content"); closed.close()
listener = socket.socket(socket.AF_UNIX); listener.bind("/srv/app/unix.sock"); listener.listen()
pair = socket.socketpair()
pair[0].sendall(b"in flight")
os.mkfifo("/srv/app/fifo"); fifo = os.open("/srv/app/fifo", os.O_RDWR)
os.write(fifo, b"queued")
locked = open("/srv/app/locked", "w"); fcntl.flock(locked, fcntl.LOCK_EX)
fd = os.open("/srv/app/mapped", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096)
mapped = mmap.mmap(fd, 4096); mapped[:6] = b"mapped"
open("/dev/shm/segment", "w").write("shared memory")
os.unlink("/etc/issue")
os.mkdir("/usr/local/made")
reading, writing = os.pipe(); os.write(writing, b"piped")
timer_started = time.monotonic()
child = os.fork()
if child == 0:
    while True:
        time.sleep(1000)
ssl.RAND_bytes(8); random.random(); uuid.uuid4()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def captured(shared):
    """The node, with a snapshot of the app taken."""
    shared.kept_spec = shared.spec(env={"HOOKS": "1", "FIRST": FIRST, "COLOUR": "red-${PORT}"})
    report = await shared.capture(shared.kept_spec)
    assert report.reason is None
    assert report.memory_bytes > 1 << 20
    assert report.layer_bytes > 0
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def clone(captured):
    report = await captured.start(captured.kept_spec)
    assert (report.kind, report.fallback) == (StartKind.RESTORED, None)
    report_and_yard = Clone(captured, report)
    yield report_and_yard
    await captured.stop(report.replica)


class Clone:
    def __init__(self, yard, report):
        self.yard, self.report = yard, report

    async def __call__(self, code):
        return await self.yard.tell(self.report.replica, code)


async def test_files_that_were_open_go_on(clone):
    code = """
log.write("after\\n"); log.flush()
answer = [open("/srv/app/open.log").read(), open("/srv/app/closed").read(), os.getcwd()]
"""
    assert await clone(code) == ["before\nafter\n", "closed content", "/srv/app/cwd"]


async def test_deleted_files_that_were_open_are_still_readable_and_still_deleted(clone):
    code = """
gone.seek(0); big.seek(0)
answer = [gone.read(), len(big.read()), sorted(os.listdir("/srv/app"))]
"""
    gone, big, names = await clone(code)
    assert (gone, big) == ("still here", 3 << 20)
    assert names == ["closed", "cwd", "fifo", "locked", "mapped", "open.log", "unix.sock"]


async def test_deletions_in_the_machines_tree_stay(clone):
    assert await clone("answer = os.path.exists('/etc/issue')") is False
    assert await clone("answer = os.path.isdir('/usr/local/made')") is True


async def test_sockets_pipes_and_fifos_keep_what_was_in_flight(clone):
    code = """
answer = [pair[1].recv(100).decode(), os.read(reading, 100).decode(), os.read(fifo, 100).decode()]
caller = socket.socket(socket.AF_UNIX); caller.connect("/srv/app/unix.sock")
caller.sendall(b"hello"); answer.append(listener.accept()[0].recv(100).decode())
"""
    assert await clone(code) == ["in flight", "piped", "queued", "hello"]


async def test_locks_mappings_and_shared_memory_are_there(clone):
    code = """
answer = [mapped[:6].decode(), open("/dev/shm/segment").read()]
other = open("/srv/app/locked", "w")
try:
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    answer.append("held")
mapped[:6] = b"change"; mapped.flush()
answer.append(open("/srv/app/mapped", "rb").read(6).decode())
"""
    assert await clone(code) == ["mapped", "shared memory", "held", "change"]


async def test_child_processes_live_on(clone):
    assert await clone("os.kill(child, 0); answer = os.getpid()") == 1


async def test_monotonic_time_goes_on_from_the_capture(clone):
    """So timers do not fire in a burst; what must expire uses wall time."""
    assert 0 < await clone("answer = time.monotonic() - timer_started") < 60


async def test_host_name_and_environment_are_the_clones_own(clone):
    code = "answer = [socket.gethostname(), os.environ['NAGARA_REPLICA'], os.environ['COLOUR']]"
    name = clone.report.replica
    assert await clone(code) == [name, name, "red-8000"]


async def test_the_parts_of_its_host_stage_are_told_and_add_up(clone):
    """With the real tool's log: when its words change, reading and mapping would read zero."""
    parts, stages = clone.report.host, clone.report.stages
    assert set(parts) == {"tool", "read", "map", "runtime", "hooks", "unaccounted"}
    assert all(parts[name] > 0 for name in ("tool", "read", "map", "runtime", "hooks"))
    assert sum(parts.values()) == pytest.approx(stages["host"])


async def test_the_kernel_is_not_tried_out_again(clone):
    log = clone.yard.state / "node/replicas" / clone.report.replica / "criu/restore.log"
    assert "criu.kdat does not exist" not in log.read_text(errors="replace")


async def test_what_it_writes_is_in_its_log(clone):
    await clone("import sys; print('a line of the clone', flush=True)")
    log = await clone.yard.node.logs(clone.report.replica)
    assert b"a line of the clone" in log
    assert b"serving" not in log  # that was the captured one


async def test_its_processes_are_in_control_groups_of_its_own(clone):
    groups = await clone("answer = open('/proc/self/cgroup').read()")
    paths = {line.split(":", 2)[2] for line in groups.splitlines()}
    mine = {path for path in paths if path.startswith("/nagara/")}
    assert len(mine) == 1
    assert mine.pop().endswith(f"-{clone.report.replica}")


async def test_it_has_no_more_rights_than_a_plainly_started_one(clone):
    status = await clone("answer = open('/proc/self/status').read()")
    lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0b0100_1110_1001
    assert lines["NoNewPrivs"].strip() == "1"
    assert lines["Seccomp"].strip() == "2"


async def test_four_at_once_all_answer_and_draw_different_numbers(captured):
    reports = await asyncio.gather(*(captured.start(captured.kept_spec) for _ in range(4)))
    assert [report.kind for report in reports] == [StartKind.RESTORED] * 4
    code = """
answer = [random.random(), str(uuid.uuid4()), os.urandom(8).hex(), ssl.RAND_bytes(8).hex()]
answer.append(random.SystemRandom().random())
"""
    drawn = await asyncio.gather(*(captured.tell(report.replica, code) for report in reports))
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 4
    await captured.stop(*(report.replica for report in reports))


async def test_clones_do_not_see_what_the_others_write(captured):
    one, two = await asyncio.gather(*(captured.start(captured.kept_spec) for _ in range(2)))
    await captured.tell(one.replica, "open('/srv/app/closed', 'w').write('of one')")
    await captured.tell(one.replica, "open('/srv/app/new', 'w').write('of one')")
    await captured.tell(one.replica, "mapped[:6] = b'of one'; mapped.flush()")
    await captured.tell(one.replica, "open('/dev/shm/segment', 'w').write('of one')")
    await captured.tell(one.replica, "os.unlink('/etc/hostname')")
    code = """
answer = [open("/srv/app/closed").read(), os.path.exists("/srv/app/new"), mapped[:6].decode()]
answer += [open("/dev/shm/segment").read(), os.path.exists("/etc/hostname")]
"""
    assert await captured.tell(two.replica, code) == [
        "closed content",
        False,
        "mapped",
        "shared memory",
        True,
    ]
    await captured.stop(one.replica, two.replica)
    three = await captured.start(captured.kept_spec)
    assert (await captured.tell(three.replica, code))[0] == "closed content"
    await captured.stop(three.replica)


async def test_a_clone_can_be_dialled_many_times_at_once(clone):
    answers = await asyncio.gather(*(clone.yard.ask(clone.report.replica) for _ in range(40)))
    assert {answer.body for answer in answers} == {b"ready"}


async def test_the_snapshot_is_private_to_root(captured):
    for place in ("snapshots", "store", "node", "files"):
        assert (captured.state / place).stat().st_mode & 0o777 == 0o700, place
    (root,) = captured.roots(captured.kept_spec.app)
    shelf = captured.shelf()
    tree = load_tree(shelf.store, shelf.read(root.name).image)
    assert len(dict(walk(tree))) > 10
    modes = {node.mode & 0o777 for _, node in walk(tree) if not node.is_folder}
    assert modes == {0o600}


async def test_every_start_is_accounted_for(captured):
    for _ in range(3):
        report = await captured.start(captured.kept_spec)
        await captured.stop(report.replica)
        assert set(report.stages) == {"acquire", "files", "host", "device", "canary"}
        unaccounted_s = report.elapsed_s - sum(report.stages.values())
        if unaccounted_s <= 0.05 * report.elapsed_s:
            return
    raise AssertionError(f"{unaccounted_s:.3f} s of {report.elapsed_s:.3f} s are unaccounted for")


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other"},
        {"app": "other"},
        {"definition": "d2"},
        {"env": {"HOOKS": "1", "FIRST": FIRST, "COLOUR": "blue"}},
        {"port": 8001},
    ],
    ids=["tenant", "app", "definition", "environment", "port"],
)
async def test_another_apps_snapshot_is_never_used(captured, changes):
    env = changes.get("env", dict(captured.kept_spec.env))
    spec = captured.spec(**{**changes, "env": env})
    report = await captured.start(spec)
    await captured.stop(report.replica)
    assert report.kind is StartKind.PLAIN
    assert report.fallback == "there is no snapshot yet"
    assert report.capture_wanted


async def test_snapshots_can_be_turned_off_for_a_start(captured):
    env = dict(captured.kept_spec.env)
    report = await captured.start(captured.spec(env=env, snapshot=False))
    await captured.stop(report.replica)
    assert (report.kind, report.fallback, report.capture_wanted) == (StartKind.PLAIN, None, False)


async def test_the_captured_replica_is_gone_and_was_never_listed_as_ready(captured):
    assert await captured.node.replicas() == ()
    record = captured.about(captured.roots(captured.kept_spec.app)[0])
    assert record["canary_answer"] == "200 the canary sings"
    assert any(mark.endswith(".so") or "python" in mark for mark in record["host_files"])


async def test_a_forgotten_app_starts_plainly_while_its_replicas_go_on(captured):
    spec = captured.spec(app="leaving", env={"FIRST": "x = 1"})
    assert (await captured.capture(spec)).reason is None
    replica = (await captured.start(spec)).replica
    await captured.node.forget_app("default", "leaving")
    assert await captured.tell(replica, "answer = x") == 1
    plain = await captured.start(spec)
    assert plain.kind is StartKind.PLAIN
    await captured.stop(replica, plain.replica)


async def test_an_app_forgotten_while_replicas_start_harms_none_of_them(captured):
    spec = captured.spec(app="in-between", env={"FIRST": "x = 1"})
    assert (await captured.capture(spec)).reason is None
    starting = [asyncio.ensure_future(captured.start(spec)) for _ in range(3)]
    await asyncio.sleep(0.03)
    await captured.node.forget_app("default", "in-between")
    for report in await asyncio.gather(*starting):
        assert await captured.tell(report.replica, "answer = x") == 1
        await captured.stop(report.replica)
    assert (await captured.start(spec)).kind is StartKind.PLAIN
