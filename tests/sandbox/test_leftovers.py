"""Finding processes that outlived whoever started them."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from nagara.sandbox.leftovers import kill_session, kill_tools_in, start_mark, tools_in


@pytest.fixture
def sleeper(tmp_path):
    folder = tmp_path / "deeper"
    folder.mkdir()
    process = subprocess.Popen(["sleep", "67"], cwd=folder, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_tool_is_found_by_the_folder_it_works_in(tmp_path, sleeper):
    assert tools_in(tmp_path) == [sleeper.pid]
    assert kill_tools_in(tmp_path / "deeper") == 1
    assert sleeper.wait(10) == -9


def test_a_folder_whose_name_only_begins_alike_is_another_one(tmp_path, sleeper):
    (tmp_path / "deep").mkdir()
    assert tools_in(tmp_path / "deep") == []


def test_a_process_with_a_terminal_is_a_person_and_left_alone(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvp("sleep", ["sleep", "68"])
    try:
        for _ in range(100):
            if Path(f"/proc/{child}/cwd").readlink() == tmp_path:
                break
        assert tools_in(tmp_path) == []
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def test_a_session_is_ended_also_when_its_leader_has_gone(tmp_path):
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 69 >/dev/null & echo $!; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    member = int(leader.stdout.readline())
    started = start_mark(leader.pid)
    leader.communicate(b"\n")
    assert start_mark(member) is not None
    assert kill_session(leader.pid, started) == 1


def test_a_session_of_another_process_with_the_same_number_is_left_alone(sleeper):
    assert kill_session(sleeper.pid, "an earlier time") == 0
    assert sleeper.poll() is None
    assert kill_session(sleeper.pid, start_mark(sleeper.pid)) == 1
    assert sleeper.wait(10) == -9
