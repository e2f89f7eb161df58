"""Control groups of a container: who is in them, freezing, removal."""

import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from nagara.sandbox.cgroups import (
    PARENT,
    cgroup_folders,
    kill_cgroup,
    remove_cgroup,
    thaw_cgroup,
)

pytestmark = pytest.mark.root
MOUNT = Path("/sys/fs/cgroup")


@pytest.fixture
def group():
    """A control group with a sleeping process in it."""
    name = f"t{secrets.token_hex(4)}"
    hierarchies = [path for path in (MOUNT / "freezer", MOUNT) if (path / "cgroup.procs").exists()]
    if not hierarchies:
        pytest.skip("needs control groups mounted at /sys/fs/cgroup")
    folder = hierarchies[0] / PARENT / name
    folder.mkdir(parents=True)
    process = subprocess.Popen(["sleep", "66"])
    (folder / "cgroup.procs").write_text(str(process.pid))
    yield name, folder, process
    thaw_cgroup(name)
    process.kill()
    process.wait()
    remove_cgroup(name)
    assert not any(cgroup_folders(name))


def test_all_processes_of_a_group_are_killed_and_counted(group):
    name, _, process = group
    assert kill_cgroup(name) == 1
    assert process.wait(10) == -signal.SIGKILL
    assert kill_cgroup(name) == 0


def test_a_frozen_process_ends_only_when_it_is_thawed(group):
    name, folder, process = group
    switch, frozen = ("freezer.state", "FROZEN")
    if not (folder / switch).exists():
        switch, frozen = ("cgroup.freeze", "1")
    (folder / switch).write_text(frozen)
    kill_cgroup(name)
    if switch == "freezer.state":  # the older hierarchy keeps even SIGKILL waiting
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    thaw_cgroup(name)
    assert process.wait(10) == -signal.SIGKILL


def test_a_group_with_processes_is_left_and_an_empty_one_removed(group):
    name, folder, process = group
    remove_cgroup(name)
    assert folder.exists()
    process.kill()
    process.wait()
    remove_cgroup(name)
    assert not folder.exists()


def test_unknown_groups_are_no_error():
    assert kill_cgroup("there-is-none") == 0
    thaw_cgroup("there-is-none")
    remove_cgroup("there-is-none")
    assert os.getpid()
