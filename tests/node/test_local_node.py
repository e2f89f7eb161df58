"""One machine's replicas: starting, ending, taking over, and what is left afterwards."""

import asyncio
import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from nagara.contract.node import NodeError, ReplicaGoneError, StartFailedError
from nagara.contract.replica import Lease, Limits, ModelMount, StartKind
from nagara.node.build import build_node
from nagara.node.logs import ReplicaLogs
from nagara.node.replica_folder import ReplicaRecord

MODES = ["container", "process"]


@pytest.fixture(params=[pytest.param("container", marks=pytest.mark.root), "process"])
async def any_yard(request, make_yard):
    """A node in either way of running replicas."""
    from .conftest import taken_down

    is_container = request.param == "container"
    if is_container:
        request.getfixturevalue("tools")
    yard = make_yard(with_tools=is_container)
    try:
        await open_as(yard, request.param)
        yard.reopen = lambda: open_as(yard, request.param)
        yield yard
    finally:
        await taken_down(yard)


async def open_as(yard, mode):
    if mode == "container":
        return await yard.open()
    return await yard.open_process_node()


def keeper_of(yard):
    from .conftest import processes_naming

    (pid,) = processes_naming(f"{yard.state}/node/keeper.sock", of_keeper=True)
    return pid


async def test_a_replica_serves_is_listed_and_is_gone_after_its_stop(any_yard):
    report = await any_yard.start()
    assert report.kind is StartKind.PLAIN
    assert (await any_yard.ask(report.replica)).body == b"ready"
    (status,) = await any_yard.node.replicas()
    assert (status.replica, status.ready, status.exit_code) == (report.replica, True, None)
    await any_yard.stop(report.replica)
    assert await any_yard.node.replicas() == ()
    assert any_yard.leftovers() == []
    with pytest.raises(ReplicaGoneError):
        await any_yard.node.dial(report.replica)
    await any_yard.stop(report.replica)


async def test_a_name_in_use_is_refused_and_its_replica_unharmed(any_yard):
    report = await any_yard.start()
    with pytest.raises(NodeError, match="exists"):
        await any_yard.start(name=report.replica)
    assert (await any_yard.ask(report.replica)).body == b"ready"


async def test_a_command_that_ends_at_once_is_told_with_its_last_words(any_yard):
    spec = any_yard.spec(command=("sh", "-c", "echo the reason; echo more >&2; exit 3"))
    with pytest.raises(StartFailedError) as caught:
        await any_yard.start(spec)
    assert "exit code 3" in caught.value.what
    assert "the reason\nmore" in caught.value.what
    assert any_yard.leftovers() == []
    assert await any_yard.node.replicas() == ()


async def test_a_command_ended_by_a_signal_is_told_so(any_yard):
    # The first process of a container does not die of SIGABRT: abort() then forces a fault.
    spec = any_yard.spec(command=("sh", "-c", "sleep 0.2; exec python -c 'import os; os.abort()'"))
    with pytest.raises(StartFailedError, match=r"signal (6|11)"):
        await any_yard.start(spec)


async def test_a_command_that_does_not_exist_is_named(any_yard):
    with pytest.raises(StartFailedError, match="no-such-program"):
        await any_yard.start(any_yard.spec(command=("no-such-program", "x")))
    assert any_yard.leftovers() == []


async def test_a_command_that_never_gets_ready_is_ended_after_its_time(any_yard):
    spec = any_yard.spec(command=("sh", "-c", "echo waiting; exec sleep 73"), start_timeout_s=0.6)
    with pytest.raises(
        StartFailedError, match=r"not answered with a 2xx in 1 s; it cannot be asked: .*\nwaiting"
    ):
        await any_yard.start(spec)
    assert any_yard.leftovers() == []


async def test_a_server_that_accepts_and_says_nothing_is_ended_after_its_time(any_yard):
    code = """
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["LISTEN"])))
kept = []
while True:
    kept.append(server.accept())
"""
    spec = any_yard.spec(command=("python", "-S", "-c", code), start_timeout_s=0.8)
    async with asyncio.timeout(15):
        with pytest.raises(StartFailedError, match="not answered"):
            await any_yard.start(spec)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.15, 0.3])
async def test_a_start_cancelled_at_any_moment_leaves_nothing(any_yard, after_s):
    starting = asyncio.ensure_future(any_yard.start(any_yard.spec(env={"WAIT_S": "20"})))
    await asyncio.sleep(after_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert any_yard.leftovers() == []
    assert await any_yard.node.replicas() == ()


async def test_a_start_that_is_stopped_is_a_failed_start(any_yard):
    name = any_yard.name()
    starting = asyncio.ensure_future(any_yard.start(any_yard.spec(env={"WAIT_S": "20"}), name))
    await asyncio.sleep(0.2)
    await any_yard.node.stop(name)
    assert await any_yard.node.replicas() == ()
    with pytest.raises(StartFailedError, match="stopped before it was ready"):
        await starting
    assert any_yard.leftovers() == []


async def test_stopping_twice_at_once_is_one_stop(any_yard):
    report = await any_yard.start()
    await asyncio.gather(*(any_yard.node.stop(report.replica) for _ in range(4)))
    assert any_yard.leftovers() == []


async def test_a_stop_that_is_cancelled_still_ends_the_replica(any_yard):
    report = await any_yard.start()
    stopping = asyncio.ensure_future(any_yard.node.stop(report.replica, grace_s=0))
    await asyncio.sleep(0.005)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert any_yard.leftovers() == []


async def test_a_replica_that_handles_sigterm_gets_its_grace(any_yard):
    first = """
import os, signal
def leave(*_):
    print("farewell", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
"""
    report = await any_yard.start(any_yard.spec(env={"FIRST": first}))
    await any_yard.node.stop(report.replica, grace_s=10)
    assert b"farewell" in await any_yard.node.logs(report.replica)


async def test_a_replica_that_ignores_sigterm_is_killed_after_the_grace(any_yard):
    first = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)"
    report = await any_yard.start(any_yard.spec(env={"FIRST": first}))
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await any_yard.node.stop(report.replica, grace_s=0.3)
    assert loop.time() - begun_s >= 0.3
    assert any_yard.leftovers() == []


@pytest.mark.root
async def test_a_first_process_without_a_handler_is_not_waited_for(yard):
    report = await yard.start()
    async with asyncio.timeout(10):  # the grace is a minute
        await yard.node.stop(report.replica, grace_s=60)


async def test_an_end_that_nobody_asked_for_is_told_and_listed(any_yard):
    report = await any_yard.start()
    exits = any_yard.node.exits()
    told = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0)
    await any_yard.tell(
        report.replica, "import os, threading; threading.Timer(0.05, os._exit, (7,)).start()"
    )
    status = await asyncio.wait_for(told, 20)
    await exits.aclose()
    assert (status.replica, status.exit_code, status.ready) == (report.replica, 7, False)
    (listed,) = await any_yard.node.replicas()
    assert listed == status
    with pytest.raises(ReplicaGoneError):
        await any_yard.node.dial(report.replica)
    await any_yard.stop(report.replica)
    assert any_yard.leftovers() == []


async def test_logs_outlive_the_replica_and_are_cut_from_the_front(any_yard):
    report = await any_yard.start()
    await any_yard.stop(report.replica)
    assert b"serving" in await any_yard.node.logs(report.replica)
    assert await any_yard.node.logs(report.replica, tail_bytes=3) == b"ng\n"
    await any_yard.node.forget_app("default", "obedient")
    with pytest.raises(ReplicaGoneError):
        await any_yard.node.logs(report.replica)


async def test_only_the_last_logs_of_an_app_are_kept(any_yard):
    folder = any_yard.state / "node/logs/default/obedient"
    folder.mkdir(parents=True)
    for number in range(30):
        path = folder / f"old-{number}.log"
        path.touch()
        os.utime(path, (number, number))
    report = await any_yard.start()
    kept = {path.name for path in folder.glob("*.log")}
    assert kept == {f"old-{n}.log" for n in range(11, 30)} | {f"{report.replica}.log"}


def test_logs_of_replicas_that_exist_stay_and_many_may_be_prepared_at_once(tmp_path):
    logs = ReplicaLogs(tmp_path)
    names = [f"r{number}" for number in range(60)]
    records = [ReplicaRecord(name, "t", "a", "d", Lease("s", 1), 80) for name in names]
    existing = frozenset(names[:30])

    def prepare(record):
        logs.prepare(record, existing)
        logs.path_for(record).touch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(prepare, records))
    kept = {path.stem for path in (tmp_path / "t/a").glob("*.log")}
    assert existing <= kept


async def test_names_that_lead_out_of_the_state_folder_are_refused(any_yard):
    with pytest.raises(NodeError, match="is not a name"):
        await any_yard.start(name="../../evil")
    with pytest.raises(NodeError, match="is not a name"):
        await any_yard.node.logs("../../etc/passwd")
    with pytest.raises(NodeError, match="is not a name"):
        await any_yard.node.forget_app("..", "..")


async def test_a_second_node_on_the_same_folder_is_refused_and_does_no_harm(any_yard):
    report = await any_yard.start()
    second = build_node(any_yard.state)
    with pytest.raises(NodeError, match="another node agent") as caught:
        await second.open()
    assert "hint:" in str(caught.value)
    assert (await any_yard.ask(report.replica)).body == b"ready"


async def test_the_next_node_takes_ready_replicas_over(any_yard):
    report = await any_yard.start()
    await any_yard.tell(report.replica, "kept = 'in memory'")
    await any_yard.close(stop_replicas=False)
    await any_yard.reopen()
    (status,) = await any_yard.node.replicas()
    assert (status.replica, status.ready, status.lease.slot) == (report.replica, True, "slot")
    assert await any_yard.tell(report.replica, "answer = kept") == "in memory"
    exits = any_yard.node.exits()
    told = asyncio.ensure_future(anext(exits))
    await any_yard.tell(
        report.replica, "import os, threading; threading.Timer(0.05, os._exit, (5,)).start()"
    )
    assert (await asyncio.wait_for(told, 20)).exit_code == 5
    await exits.aclose()
    await any_yard.stop(report.replica)
    assert any_yard.leftovers() == []


async def test_the_next_node_clears_away_what_ended_meanwhile(any_yard):
    report = await any_yard.start()
    await any_yard.tell(
        report.replica, "import os, threading; threading.Timer(0.3, os._exit, (5,)).start()"
    )
    await any_yard.close(stop_replicas=False)
    await asyncio.sleep(0.5)
    await any_yard.reopen()
    assert await any_yard.node.replicas() == ()
    assert any_yard.leftovers() == []


async def test_the_next_node_clears_away_what_was_never_ready(any_yard):
    report = await any_yard.start()
    await any_yard.close(stop_replicas=False)
    record = any_yard.state / "node/replicas" / report.replica / "record.json"
    record.write_text(record.read_text().replace('"ready":true', '"ready":false'))
    await any_yard.reopen()
    assert await any_yard.node.replicas() == ()
    assert any_yard.leftovers() == []


@pytest.mark.parametrize("damage", ["empty", "missing", "nonsense"])
async def test_a_damaged_record_is_cleared_away(any_yard, damage):
    report = await any_yard.start()
    await any_yard.close(stop_replicas=False)
    record = any_yard.state / "node/replicas" / report.replica / "record.json"
    if damage == "missing":
        record.unlink()
    else:
        record.write_text("" if damage == "empty" else '{"replica": 1}')
    await any_yard.reopen()
    assert await any_yard.node.replicas() == ()
    assert any_yard.leftovers() == []


async def test_when_the_keeper_is_killed_its_replicas_count_as_killed_and_new_ones_start(any_yard):
    report = await any_yard.start()
    exits = any_yard.node.exits()
    told = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0.05)
    os.kill(keeper_of(any_yard), signal.SIGKILL)
    status = await asyncio.wait_for(told, 20)
    await exits.aclose()
    assert (status.replica, status.exit_code) == (report.replica, -signal.SIGKILL)
    again = await any_yard.start()
    assert (await any_yard.ask(again.replica)).body == b"ready"
    await any_yard.stop(report.replica, again.replica)
    assert any_yard.leftovers() == []


async def test_when_the_keeper_is_killed_without_a_node_the_next_node_clears_up(any_yard):
    await any_yard.start()
    await any_yard.close(stop_replicas=False)
    os.kill(keeper_of(any_yard), signal.SIGKILL)
    await any_yard.reopen()
    assert await any_yard.node.replicas() == ()
    assert any_yard.leftovers() == []


async def test_a_keeper_without_replicas_ends_with_its_node(any_yard):
    from .conftest import processes_naming

    report = await any_yard.start()
    await any_yard.stop(report.replica)
    await any_yard.close(stop_replicas=False)
    await asyncio.sleep(0.2)
    assert processes_naming(f"{any_yard.state}/node/keeper.sock", of_keeper=True) == []


@pytest.mark.root
async def test_many_at_once_start_and_stop_without_a_trace(yard):
    reports = await asyncio.gather(*(yard.start() for _ in range(6)))
    await asyncio.gather(*(yard.ask(report.replica) for report in reports for _ in range(5)))
    await yard.stop(*(report.replica for report in reports))
    assert yard.leftovers() == []


@pytest.mark.root
async def test_a_model_is_shown_read_only_and_a_missing_one_is_named(yard):
    model = yard.state / "models/tiny"
    model.mkdir(parents=True)
    (model / "weights").write_text("w")
    with pytest.raises(NodeError, match="no such model"):
        await yard.start(yard.spec(models=(ModelMount("large", "d"),)))
    report = await yard.start(yard.spec(models=(ModelMount("tiny", "d"),)))
    code = """
answer = [open("/models/tiny/weights").read()]
try:
    open("/models/tiny/weights", "w")
except OSError as error:
    answer.append(error.strerror)
"""
    assert await yard.tell(report.replica, code) == ["w", "Read-only file system"]


@pytest.mark.root
async def test_ports_in_commands_and_settings_are_filled_in(yard):
    report = await yard.start(yard.spec(port=8123, env={"URL": "http://x:${PORT}/$HOME"}))
    assert await yard.tell(report.replica, "import os; answer = os.environ['URL']") == (
        "http://x:8123/$HOME"
    )


@pytest.mark.root
async def test_a_limit_too_small_to_start_is_a_failed_start(yard):
    with pytest.raises(StartFailedError):
        await yard.start(yard.spec(limits=Limits(memory_bytes=2 << 20)))
    assert yard.leftovers() == []


async def test_facts_say_how_replicas_are_run_and_what_is_missing(any_yard):
    facts = await any_yard.node.facts()
    assert facts.cores >= 1
    assert facts.memory_bytes > 1 << 28
    if facts.isolation == "process":
        assert not facts.can_snapshot
        assert facts.missing


async def test_a_disk_that_is_full_is_said_with_what_to_do(any_yard, monkeypatch):
    from nagara.node.replica_folder import ReplicaFolder

    def full(self, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr(ReplicaFolder, "create", full)
    with pytest.raises(NodeError, match="No space left") as caught:
        await any_yard.start()
    assert "free space" in str(caught.value)
    assert await any_yard.node.replicas() == ()


async def test_processes_of_the_machine_other_than_replicas_are_left_alone(any_yard):
    other = await asyncio.create_subprocess_exec("sleep", "74", start_new_session=True)
    try:
        report = await any_yard.start()
        await any_yard.stop(report.replica)
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()
