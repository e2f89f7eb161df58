"""The laboratory of machines: what its links do, and that nothing of it outlives anybody."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.cli.lab_machines import LabMachine, Laboratory, clear_leftovers, laboratory
from nagara.sandbox.cgroups import cgroup_folders, hierarchies, remove_cgroup

pytestmark = [pytest.mark.root]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    with laboratory(tmp_path, 3) as made:
        yield made


def pings(source: LabMachine, target: LabMachine, *, count: int = 1, wait_s: float = 1) -> int:
    """How many of so many small questions are answered in time."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(float(sys.argv[3]))\n"
        "got = 0\n"
        "for n in range(int(sys.argv[2])):\n"
        "    try:\n"
        "        s.sendto(b'%d' % n, (sys.argv[1], 9000))\n"
        "        while s.recv(100) != b'%d' % n: pass\n"
        "        got += 1\n"
        "    except OSError: pass\n"
        "print(got)\n"
    )
    said = source.spaces.run(sys.executable, "-c", code, target.address, str(count), str(wait_s))
    return int(said)


def echoing(machine: LabMachine) -> None:
    code = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 9000))\n"
        "print('ready', flush=True)\n"
        "while True: s.sendto(*s.recvfrom(100))\n"
    )
    process = machine.begin(sys.executable, "-c", code, log="echo.log")
    until(lambda: "ready" in process.said())


def until(is_so: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.02)


def test_machines_reach_each_other_until_a_link_is_cut_and_again_when_it_is_healed(
    lab: Laboratory,
) -> None:
    m0, m1, m2 = lab.machines
    echoing(m1)
    echoing(m2)
    assert m0.spaces.run("hostname").strip() == "m0"
    until(lambda: pings(m0, m1) == 1)
    m1.link.cut()
    assert pings(m0, m1, count=3, wait_s=0.2) == 0
    assert pings(m0, m2, count=3) == 3, "only one link was cut"
    m1.link.heal()
    until(lambda: pings(m0, m1) == 1)


def test_a_slow_link_delays_both_ways_and_drops_a_share(lab: Laboratory) -> None:
    m0, m1, _ = lab.machines
    echoing(m1)
    until(lambda: pings(m0, m1) == 1)
    m1.link.slow(round_trip_ms=400, loss=0.0)
    until(lambda: pings(m0, m1, wait_s=5) == 1)  # addresses are known on both sides
    assert pings(m0, m1, wait_s=0.3) == 0, "an answer came before its time"
    assert pings(m0, m1, count=3, wait_s=5) == 3
    m1.link.slow(round_trip_ms=1, loss=0.5)
    until(lambda: pings(m0, m1, count=3, wait_s=0.2) > 0)
    assert 0 < pings(m0, m1, count=30, wait_s=0.1) < 30
    m1.link.heal()
    until(lambda: pings(m0, m1) == 1)


def test_a_shaped_link_passes_no_more_than_its_rate(lab: Laboratory) -> None:
    m0, m1, _ = lab.machines
    m1.link.shape(1.0)
    shown = m1.spaces.run("tc", "qdisc", "show", "dev", "eth0")
    assert "tbf" in shown
    assert "rate 1Gbit" in shown
    m1.link.shape(None)
    assert "tbf" not in m1.spaces.run("tc", "qdisc", "show", "dev", "eth0")
    m1.link.shape(None)
    assert m0.spaces.run("tc", "qdisc", "show", "dev", "eth0") is not None


def test_a_machine_has_a_disk_run_and_cpu_of_its_own(lab: Laboratory) -> None:
    m0, m1, _ = lab.machines
    small = m0.small_disk("store", 1 << 20)
    with pytest.raises(Exception, match="No space left"):
        m0.spaces.run("dd", "if=/dev/zero", f"of={small}/large", "bs=1M", "count=2")
    assert not list(small.iterdir()), "it is mounted outside, too"
    m0.spaces.run("touch", "/run/mark")
    assert "mark" not in m1.spaces.run("ls", "/run")
    flag = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
    ).split()[2]
    m0.lose_cpu_flags([flag])
    flags = m0.spaces.run("grep", "-m1", "^flags", "/proc/cpuinfo").split()
    assert flag not in flags
    assert len(flags) > 10


def test_everything_ends_with_the_process_that_made_it_even_if_it_is_killed(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from nagara.cli.lab_machines import laboratory\n"
        "with laboratory(Path(sys.argv[1]), 2) as lab:\n"
        "    m = lab.machines[0]\n"
        "    (m.state / 'node/replicas/lab-test-left').mkdir(parents=True)\n"
        "    inner = m.begin('sh', '-c', 'sleep 1000 & sleep 1000', log='sleep.log')\n"
        "    print(m.spaces.pid, inner.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    group = hierarchies()[0] / "nagara" / "lab-test-left"
    try:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        group.mkdir(parents=True)
        assert clear_leftovers(tmp_path) == [], "it is in use"
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        until(lambda: not any(_runs(pid) for pid in pids))
        with laboratory(tmp_path, 1) as lab:
            assert list(tmp_path.glob("nagara-lab-*")) == [lab.folder]
        assert not list(cgroup_folders("lab-test-left"))
        assert not list(tmp_path.glob("nagara-lab-*"))
    finally:
        maker.kill()
        maker.wait()
        assert maker.stdout is not None
        maker.stdout.close()
        remove_cgroup("lab-test-left")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_inside_is_signalled_and_its_end_is_known(lab: Laboratory) -> None:
    machine = lab.machines[0]
    sleeping = machine.begin("sleep", "1000", log="sleep.log")
    assert sleeping.exit_code is None
    spaces = [Path(f"/proc/{pid}/ns/net").readlink() for pid in (sleeping.pid, machine.spaces.pid)]
    assert spaces[0] == spaces[1]
    assert sleeping.end(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGCONT])
def test_a_stopped_process_goes_on_or_ends_as_it_is_told_to(
    lab: Laboratory, number: signal.Signals
) -> None:
    begun = lab.machines[0].begin("sleep", "1000", log="sleep.log")
    both = (begun.pid, begun._outer.pid)  # what started it stops with it
    begun.send(signal.SIGSTOP)
    until(lambda: [state(pid) for pid in both] == ["T", "T"])
    if number is signal.SIGCONT:
        begun.send(number)
        until(lambda: "T" not in [state(pid) for pid in both])
        number = signal.SIGTERM
    assert begun.end(number) == -number


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
