"""Machines beside this one: real agents that a pool file's programs start and end."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nagara.image.mounts import unmount_tree
from nagara.node.leftovers import owned_by

from .conftest import Up, wait_for

RACK = Path(__file__).parent.parent / "apps" / "rack.py"


class Rack:
    """The provider's side: what really exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pool.toml"

    def write_file(self, *, local: int = 0, least_free: int = 1) -> None:
        programs = [
            f"{verb} = {json.dumps([sys.executable, '-P', str(RACK), str(self.folder), verb])}"
            for verb in ("offerings", "launch", "release", "machines")
        ]
        here = f'[provider.here]\nkind = "local"\nslots = {local}\n' if local else ""
        policy = f"[pool]\nleast_free = {least_free}\nspare_machines = 0\n"
        self.file.write_text(
            policy + here + '[provider.rack]\nkind = "command"\n' + "\n".join(programs) + "\n"
        )

    def machines(self) -> list[Path]:
        return sorted((self.folder / "machines").glob("*"))

    def agent(self, machine: Path) -> int:
        return int((machine / "agent.pid").read_text())

    def kill_caller_at(self, moment: str) -> None:
        (self.folder / "kill").write_text(moment)

    def clear(self) -> None:
        """After a failure, too, nothing of any machine may be left."""
        for machine in self.machines():
            os.system(f"{sys.executable} -P {RACK} {self.folder} release < /dev/null 2>/dev/null")
            pid = self.agent(machine)
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
            Up(machine).run("doctor", "--leaks", "--clear")
            if os.geteuid() == 0:
                unmount_tree(machine)


@pytest.fixture
def rack(up: Any) -> Iterator[Rack]:
    folder = up.state.parent / "rack"
    folder.mkdir()
    if (up.state / "tools").exists():
        (folder / "tools").symlink_to((up.state / "tools").resolve())
    rack = Rack(folder)
    try:
        yield rack
    finally:
        if up.process is not None:
            up.end()
        left = [owned for machine in rack.machines() for owned in owned_by(machine)]
        rack.clear()
        print("left on the rack's machines:", left)


def pool(up: Any) -> dict[str, Any]:
    return up.admin.pool()


def ready(up: Any) -> list[dict[str, Any]]:
    return [one for one in pool(up)["machines"] if one["state"] == "ready"]


def begin_with_machine(up: Any, rack: Rack, **settings: int) -> str:
    """Up with one deployed app and at least one machine of the rack; gives an API key."""
    rack.write_file(**settings)
    up.begin("--pool", str(rack.file))
    up.deploy(up.obedient(snapshot=False))
    wait_for(lambda: any(one["provider"] == "rack" for one in ready(up)))
    return up.admin.add_key("test")


def test_a_replica_runs_on_a_launched_machine_and_its_slot_comes_back(up: Any, rack: Rack) -> None:
    key = begin_with_machine(up, rack)
    status, body, headers = up.get("/obedient/", key=key)
    assert (status, body) == (200, b"ready")
    (machine,) = ready(up)
    (lease,) = machine["leases"]
    assert (lease["app"], machine["leased"]) == ("obedient", 1)
    assert owned_by(rack.machines()[0]), "the replica is not on the other machine"
    assert b"serving" in up.admin.logs("obedient")[1]
    (start,) = up.admin.trace("obedient")["starts"]
    assert start["replica"] == headers["x-nagara-replica"]
    assert up.admin.fold("obedient") == 1
    wait_for(lambda: pool(up)["leased"] == 0)
    status, _, headers = up.get("/obedient/", key=key)
    assert (status, headers["x-nagara-replica"] != start["replica"]) == (200, True)
    (again,) = ready(up)[0]["leases"]
    assert (again["slot"], again["epoch"] > lease["epoch"]) == (lease["slot"], True)
    said = up.run("pool", "explain").stdout
    assert "This is" in said


def test_a_killed_control_process_takes_machine_and_replica_over(up: Any, rack: Rack) -> None:
    key = begin_with_machine(up, rack)
    before = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    names = [machine.name for machine in rack.machines()]
    up.end(signal.SIGKILL)
    up.begin("--pool", str(rack.file))
    status, _, headers = up.get("/obedient/", key=key)
    assert (status, headers["x-nagara-replica"]) == (200, before)
    assert [machine.name for machine in rack.machines()] == names


@pytest.mark.parametrize("moment", ["launch before", "launch after", "machines after"])
def test_no_machine_is_lost_or_leaked_when_control_is_killed(
    up: Any, rack: Rack, moment: str
) -> None:
    rack.write_file()
    app_file = up.state / "app.toml"
    app_file.write_text(up.obedient(snapshot=False))
    up.begin("--pool", str(rack.file), str(app_file))
    rack.kill_caller_at(moment)
    assert up.process.wait(60) == -signal.SIGKILL
    up.process = None
    (up.state / "control.json").unlink()
    up.begin("--pool", str(rack.file))
    wait_for(lambda: len(ready(up)) == 1)
    assert up.get("/obedient/", key=up.admin.add_key("test"))[0] == 200

    def is_reconciled() -> bool:
        known = {one["name"] for one in pool(up)["machines"]}
        return {machine.name for machine in rack.machines()} == known

    wait_for(is_reconciled)


def test_a_machine_that_nobody_remembers_is_released(up: Any, rack: Rack) -> None:
    begin_with_machine(up, rack)
    prefix = pool(up)["pool"]
    (rack.folder / "machines" / f"{prefix}-stray").mkdir()
    (rack.folder / "machines" / "somebody-elses").mkdir()
    wait_for(lambda: not (rack.folder / "machines" / f"{prefix}-stray").exists())
    assert (rack.folder / "machines" / "somebody-elses").exists()
    (rack.folder / "machines" / "somebody-elses").rmdir()


def test_a_machine_that_is_cut_off_ends_its_replica_by_itself_and_is_replaced(
    up: Any, rack: Rack
) -> None:
    key = begin_with_machine(up, rack, local=1, least_free=2)
    (other,) = (one for one in ready(up) if one["provider"] == "rack")
    here = next(one["name"] for one in ready(up) if one["provider"] == "local")
    up.run("pool", "drain", here)
    first = up.get("/obedient/", key=key)[2]["x-nagara-replica"]
    machine = rack.folder / "machines" / other["name"]
    up.run("pool", "drain", here, "--resume")
    os.kill(rack.agent(machine), signal.SIGSTOP)  # nobody there renews or answers
    wait_for(lambda: not processes_of(machine, first))
    wait_for(lambda: up.get("/obedient/", key=key)[0] == 200)
    assert up.get("/obedient/", key=key)[2]["x-nagara-replica"] != first
    os.kill(rack.agent(machine), signal.SIGCONT)


def processes_of(machine: Path, replica: str) -> list[int]:
    """The app's processes of a replica on a machine, whatever its agent would say."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
                is_dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if f"NAGARA_REPLICA={replica}".encode() in environ and not is_dead:
                found.append(int(entry.name))
    return found
