"""The keeper as a process of its own, asked through its client."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from nagara.sandbox.keeper_client import KeeperClient, KeeperError, LaunchError
from nagara.sandbox.kept_leases import boot_time_s
from nagara.sandbox.unix_socket import connect

ENV = {"PATH": os.environ["PATH"]}


class Kept:
    """A keeper and the folder it works in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = KeeperClient(folder / "keeper.sock")
        self.log = folder / "child.log"

    async def launch(self, name: str, *argv: str, pid_file: Path | None = None) -> int:
        return await self.client.launch(
            name,
            argv,
            env=ENV,
            cwd=self.folder,
            log=self.log,
            pid_file=pid_file,
            time_limit_s=20,
        )

    async def python(self, name: str, code: str, **options: Path) -> int:
        return await self.launch(name, sys.executable, "-I", "-S", "-c", code, **options)

    async def ended(self, name: str) -> int:
        """Waits for the exit code."""
        for _ in range(1000):
            for child in await self.client.children():
                if child.name == name and child.exit_code is not None:
                    return child.exit_code
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} does not end")

    def pid(self) -> int:
        """The keeper's own."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if os.fsencode(self.folder / "keeper.sock") in words:
                    return int(entry.name)
        raise AssertionError("no keeper runs")

    async def written(self, text: bytes) -> None:
        for _ in range(500):
            if text in self.log.read_bytes():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.log.read_bytes())


def is_gone(pid: int) -> bool:
    """Whether the process has ended, perhaps without having been reaped."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


async def until_gone(pid: int) -> None:
    for _ in range(500):
        if is_gone(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pid} is still there")


@pytest.fixture
async def kept(tmp_path):
    kept = Kept(tmp_path)
    await kept.client.ensure()
    pid = kept.pid()
    yield kept
    if is_gone(pid):
        return
    os.kill(pid, signal.SIGCONT)
    for child in await kept.client.children():
        await kept.client.signal(child.name, signal.SIGKILL)
    for child in await kept.client.children():
        await kept.ended(child.name)
    await kept.client.shutdown()
    await until_gone(pid)
    said = (tmp_path / "keeper.log").read_text().splitlines()
    assert all(line.endswith("its lease is over") for line in said), said


async def test_what_a_child_writes_to_both_streams_is_in_its_log(kept):
    await kept.python("a", "import sys; print('out'); print('err', file=sys.stderr)")
    assert await kept.ended("a") == 0
    await kept.written(b"out")
    await kept.written(b"err")


async def test_after_a_drain_what_was_written_before_is_in_the_log(kept):
    code = """
import time
for number in range(1000):
    time.sleep(0.01)
    print(number, flush=True)
    open("mark", "w").write(str(number))
"""
    await kept.python("a", code)
    for _ in range(20):
        await asyncio.sleep(0.011)
        with contextlib.suppress(FileNotFoundError):
            mark = (kept.folder / "mark").read_text()
            await kept.client.drain("a")
            assert mark in kept.log.read_text().split() or not mark
    await kept.client.drain("unknown")


async def test_exit_codes_and_signals_are_told_apart(kept):
    await kept.python("code", "raise SystemExit(7)")
    pid = await kept.python("signal", "import time; time.sleep(60)")
    os.kill(pid, signal.SIGTERM)
    assert await kept.ended("code") == 7
    assert await kept.ended("signal") == -signal.SIGTERM


async def test_a_signal_reaches_the_whole_session_of_a_command(kept):
    code = """
import subprocess, time
subprocess.Popen(["sleep", "61"])
print("up", flush=True)
time.sleep(60)
"""
    leader = await kept.python("a", code)
    await kept.written(b"up")
    members = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and os.getsid(int(path.name)) == leader
    ]
    assert len(members) == 2
    await kept.client.signal("a", signal.SIGKILL)
    for pid in members:
        await until_gone(pid)


async def test_workers_that_outlive_their_command_are_ended_with_it(kept):
    code = "import subprocess; print(subprocess.Popen(['sleep', '62']).pid, flush=True)"
    await kept.python("a", code)
    assert await kept.ended("a") == 0
    await until_gone(int(kept.log.read_text()))


async def test_a_command_that_cannot_be_run_is_an_error_with_its_name(kept):
    with pytest.raises(LaunchError, match="no-such-program"):
        await kept.launch("a", "no-such-program")
    assert await kept.client.children() == ()


async def test_a_name_is_free_again_when_its_child_has_ended(kept):
    await kept.python("a", "import time; time.sleep(60)")
    with pytest.raises(LaunchError, match="already running"):
        await kept.python("a", "")
    with pytest.raises(KeeperError, match="still running"):
        await kept.client.forget("a")
    await kept.client.signal("a", signal.SIGKILL)
    await kept.ended("a")
    await kept.client.forget("a")
    assert await kept.client.children() == ()
    await kept.python("a", "")
    assert await kept.ended("a") == 0


async def test_it_does_not_end_while_a_child_runs(kept):
    await kept.python("a", "import time; time.sleep(60)")
    with pytest.raises(KeeperError, match="still running"):
        await kept.client.shutdown()


async def test_children_live_on_when_the_client_has_gone(tmp_path, kept):
    starter = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from nagara.sandbox.keeper_client import KeeperClient
async def main():
    client = KeeperClient(Path({str(tmp_path / "keeper.sock")!r}))
    code = "import time; print('alive', flush=True); time.sleep(60)"
    argv = [sys.executable, "-I", "-S", "-c", code]
    options = dict(env={{}}, cwd=Path("/"), log=Path({str(kept.log)!r}), pid_file=None)
    print(await client.launch("a", argv, **options, time_limit_s=20))
asyncio.run(main())
"""
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, stdout=-1)
    out, _ = await done.communicate()
    assert done.returncode == 0
    (child,) = await kept.client.children()
    assert (child.name, child.pid, child.exit_code) == ("a", int(out), None)
    await kept.written(b"alive")


async def test_a_client_that_leaves_in_the_middle_of_a_launch_changes_nothing(kept, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, time
time.sleep(0.3)
child = subprocess.Popen(["sleep", "63"], start_new_session=True)
open({str(pid_file)!r}, "w").write(str(child.pid))
"""
    launching = asyncio.ensure_future(kept.python("a", code, pid_file=pid_file))
    await asyncio.sleep(0.1)
    launching.cancel()
    await asyncio.wait([launching])
    for _ in range(500):
        (child,) = await kept.client.children()
        if child.pid is not None:
            break
        await asyncio.sleep(0.01)
    assert child.pid == int(pid_file.read_text())
    assert child.exit_code is None


async def test_with_a_pid_file_the_process_named_there_is_the_child(kept, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess
child = subprocess.Popen(["sh", "-c", "sleep 0.3; exit 5"], start_new_session=True)
open({str(pid_file)!r}, "w").write(str(child.pid))
"""
    pid = await kept.python("a", code, pid_file=pid_file)
    assert pid == int(pid_file.read_text())
    assert await kept.ended("a") == 5


async def test_a_first_process_that_ends_before_its_launcher_is_not_missed(kept, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"""
import os, time
if os.fork() == 0:
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(9)
    open({str(pid_file)!r}, "w").write(str(child))
    os._exit(0)
time.sleep(0.3)
"""
    await kept.python("a", code, pid_file=pid_file)
    assert await kept.ended("a") == 9


async def test_a_launcher_that_fails_is_an_error_with_its_exit_code(kept, tmp_path):
    with pytest.raises(LaunchError) as caught:
        await kept.python("a", "print('why'); raise SystemExit(3)", pid_file=tmp_path / "pid")
    assert caught.value.exit_code_of_launcher == 3
    assert b"why" in kept.log.read_bytes()


async def test_killing_a_launcher_takes_its_helpers_along(kept, tmp_path):
    code = """
import subprocess, time
print(subprocess.Popen(["sleep", "64"]).pid, flush=True)
time.sleep(60)
"""
    launching = asyncio.ensure_future(kept.python("a", code, pid_file=tmp_path / "pid"))
    while not kept.log.exists() or not kept.log.read_text():
        await asyncio.sleep(0.01)
    await kept.client.signal("a", signal.SIGKILL)
    with pytest.raises(LaunchError):
        await launching
    await until_gone(int(kept.log.read_text()))


async def test_watchers_hear_of_every_end_also_of_those_before_they_came(kept):
    await kept.python("early", "raise SystemExit(1)")
    await kept.ended("early")
    exits = kept.client.exits()
    assert (await anext(exits)).name == "early"
    await kept.python("late", "raise SystemExit(2)")
    late = await anext(exits)
    assert (late.name, late.exit_code) == ("late", 2)
    await exits.aclose()


async def test_a_log_is_bounded_and_loses_only_its_oldest_part(kept):
    code = """
import sys
for number in range(20):
    sys.stdout.write(f"block {number:3}" + "x" * (1 << 20) + "\\n")
"""
    await kept.python("a", code)
    await kept.ended("a")
    await kept.written(b"block  19")
    older = kept.log.with_name(kept.log.name + ".1")
    sizes = [kept.log.stat().st_size, older.stat().st_size]
    assert max(sizes) <= 8 << 20
    assert sum(sizes) > 8 << 20
    assert kept.log.stat().st_mode & 0o777 == 0o600


async def test_a_log_whose_folder_is_gone_does_not_trouble_the_child(kept, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    kept.log = folder / "a.log"
    code = (
        "import sys, time\ntime.sleep(0.3)\nfor _ in range(20): sys.stdout.write('x' * (1 << 20))"
    )
    await kept.python("a", code)
    kept.log.unlink()
    folder.rmdir()
    assert await kept.ended("a") == 0


async def test_a_pipe_that_closes_together_with_its_child_being_forgotten_is_no_harm(kept):
    code = """
import subprocess, sys
print(subprocess.Popen(["sleep", "65"], start_new_session=True).pid, flush=True)
"""
    await kept.python("a", code)
    await kept.ended("a")
    await kept.written(b"\n")
    holder = int(kept.log.read_text())  # it still holds the pipe open
    connection = connect(kept.folder / "keeper.sock", timeout_s=10)
    connection.sendall(b'{"op": "list"}\n')
    connection.recv(4096)
    keeper = kept.pid()
    os.kill(keeper, signal.SIGSTOP)
    try:
        connection.sendall(b'{"op": "forget", "id": "a"}\n')
        os.kill(holder, signal.SIGKILL)
        time.sleep(0.1)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert json.loads(connection.recv(4096)) == {}
    connection.close()
    assert await kept.client.children() == ()


async def test_what_is_no_request_gets_an_error_and_nothing_else_happens(kept):
    with connect(kept.folder / "keeper.sock", timeout_s=10) as connection:
        lines = connection.makefile("rb")
        nonsense = (
            b"not json",
            b"[" * 60_000,
            b"[]",
            b'{"op": "dance"}',
            b'{"op": "signal"}',
            b'"op"',
        )
        for request in nonsense:
            connection.sendall(request + b"\n")
            assert "error" in json.loads(lines.readline()), request
    assert await kept.client.children() == ()


async def test_only_one_keeper_serves_a_socket(kept):
    first = kept.pid()
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "nagara.sandbox.keeper", str(kept.folder / "keeper.sock")
    )
    assert await asyncio.wait_for(second.wait(), 20) == 0
    assert kept.pid() == first
    await kept.client.children()


async def test_when_the_keeper_is_killed_its_commands_end_and_a_new_one_takes_its_place(kept):
    pid = await kept.python("a", "import time; time.sleep(60)")
    keeper = kept.pid()
    exits = kept.client.exits()
    waiting = asyncio.ensure_future(anext(exits))
    await asyncio.sleep(0.05)
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(KeeperError):
        await waiting
    await until_gone(pid)
    await kept.client.ensure()
    assert kept.pid() != keeper
    assert await kept.client.children() == ()
    await kept.client.shutdown()


async def test_a_keeper_that_is_not_there_is_an_error_that_says_so(tmp_path):
    with pytest.raises(KeeperError, match=r"cannot be reached"):
        await KeeperClient(tmp_path / "keeper.sock").children()


@pytest.mark.root
async def test_another_user_is_refused_whatever_the_modes_say(kept):
    path = kept.folder / "keeper.sock"
    for folder in (path, *path.parents):
        if folder != Path("/") and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o077)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            with connect(path, timeout_s=10) as connection:
                connection.sendall(b'{"op": "list"}\n')
                os.write(writing, connection.recv(4096) or b"closed")
        except ConnectionError:
            os.write(writing, b"closed")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"closed"
    os.waitpid(child, 0)


async def leased(kept, name, slot, epoch, end_s=None, **options):
    """A child that would run for a minute, under a lease."""
    await kept.client.begin_lease(name, slot, epoch, end_s)
    await kept.python(name, "import time; time.sleep(60)", **options)


async def test_a_child_whose_lease_is_over_is_killed_with_nobody_else_alive(kept):
    await leased(kept, "a", "m/0", 1, boot_time_s() + 0.3)
    await leased(kept, "b", "m/1", 1)
    assert await kept.ended("a") == -signal.SIGKILL
    running = [one.name for one in await kept.client.children() if one.exit_code is None]
    assert running == ["b"]


async def test_a_lease_that_is_renewed_lets_its_child_live(kept):
    begun_s, _ = await kept.client.renew(())
    await leased(kept, "a", "m/0", 1, begun_s + 0.5)
    renewal = {"slot": "m/0", "epoch": 1, "mark_s": begun_s, "ttl_s": 1.5}
    assert (await kept.client.renew([renewal]))[1] == ()
    while (await kept.client.renew(()))[0] < begun_s + 1.0:
        await asyncio.sleep(0.05)
    (child,) = await kept.client.children()
    assert child.exit_code is None
    assert await kept.ended("a") == -signal.SIGKILL
    assert (await kept.client.renew([{**renewal, "ttl_s": 60.0}]))[1] == ("m/0",)


async def test_a_newer_lease_of_the_slot_ends_the_child_of_the_older_one(kept):
    await leased(kept, "old", "m/0", 1)
    assert await kept.client.begin_lease("new", "m/0+1", 2, None) == ("old",)
    assert await kept.ended("old") == -signal.SIGKILL
    with pytest.raises(KeeperError, match="another has followed"):
        await kept.client.begin_lease("late", "m/1", 1, None)


async def test_a_fenced_slot_lets_no_older_start_through_also_after_the_keeper_was_killed(kept):
    await leased(kept, "a", "m/0", 3)
    assert await kept.client.fence("m/0", 4) == ("a",)
    assert await kept.ended("a") == -signal.SIGKILL
    with pytest.raises(LaunchError, match="another has followed"):
        await kept.python("a", "")  # its launch carries the lease that is over
    keeper = kept.pid()
    os.kill(keeper, signal.SIGKILL)
    await until_gone(keeper)
    await kept.client.ensure()
    with pytest.raises(KeeperError, match="another has followed"):
        await kept.client.begin_lease("late", "m/0", 3, None)
    await kept.client.begin_lease("next", "m/0", 4, None)
    await kept.client.shutdown()


async def test_a_lease_that_is_over_while_its_container_is_being_made_ends_the_container(kept):
    code = "import subprocess, time; time.sleep(0.5); p = subprocess.Popen(['sleep', '60'])"
    pid_file = kept.folder / "pid"
    code += f"; open({str(pid_file)!r}, 'w').write(str(p.pid))"
    await kept.client.begin_lease("a", "m/0", 1, boot_time_s() + 0.2)
    with contextlib.suppress(LaunchError):
        await kept.python("a", code, pid_file=pid_file)
    assert await kept.ended("a") != 0


async def test_a_replica_that_is_gone_leaves_its_slot_to_the_same_epoch(kept):
    await leased(kept, "a", "m/0", 1, boot_time_s() + 30)
    await kept.client.signal("a", signal.SIGKILL)
    await kept.ended("a")
    await kept.client.end_lease("a")
    assert await kept.client.begin_lease("b", "m/0", 1, None) == ()
