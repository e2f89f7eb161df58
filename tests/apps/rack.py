"""Four programs of a `command` provider whose machines are agents of their own on this host.

    python rack.py FOLDER VERB      VERB: offerings, launch, release, machines

Each machine is a state folder below FOLDER with its agent. A file `kill` there holds `VERB before`
or `VERB after`: then the process that called the verb is killed at that moment, once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DEVICES = 2


def nagara(machine: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(machine), *arguments]


def fail(folder: Path, moment: str) -> None:
    """Kills the caller, if a test has asked for it."""
    wanted = folder / "kill"
    if wanted.exists() and wanted.read_text() == moment:
        wanted.unlink()
        os.kill(os.getppid(), signal.SIGKILL)


def launch(folder: Path) -> None:
    name = json.load(sys.stdin)["name"]
    machine = folder / "machines" / name
    if machine.exists():
        return
    machine.mkdir(parents=True)
    for shared in ("models", "tools"):
        if (folder / shared).exists():
            (machine / shared).symlink_to((folder / shared).resolve())
    with (machine / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            nagara(machine, "agent"), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    (machine / "agent.pid").write_text(str(agent.pid))


def end_agent(machine: Path) -> None:
    """However it is: running, stopped, or half made."""
    try:
        pid = int((machine / "agent.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)
    except (OSError, ValueError):
        pass


def power_off(machine: Path) -> None:
    """As a machine that is given back: nothing of it is left."""
    end_agent(machine)
    subprocess.run(
        nagara(machine, "doctor", "--leaks", "--clear"), capture_output=True, check=False
    )
    shutil.rmtree(machine)


def machines(folder: Path) -> list[dict[str, str]]:
    return [
        {
            "name": machine.name,
            "offering": "small",
            "presence": "running" if (machine / "agent.sock").exists() else "pending",
            "address": str(machine / "agent.sock"),
        }
        for machine in sorted((folder / "machines").glob("*"))
    ]


def main() -> None:
    folder, verb = Path(sys.argv[1]), sys.argv[2]
    fail(folder, f"{verb} before")
    if verb == "offerings":
        offering = {"id": "small", "region": "rack-1", "type": "cpu", "price_h": 1.0}
        print(json.dumps([{**offering, "devices": DEVICES}]))
    elif verb == "launch":
        launch(folder)
    elif verb == "release":
        machine = folder / "machines" / json.load(sys.stdin)["name"]
        if machine.exists():
            power_off(machine)
    else:
        print(json.dumps(machines(folder)))
    fail(folder, f"{verb} after")


if __name__ == "__main__":
    main()
