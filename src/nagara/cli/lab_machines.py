"""A laboratory of machines on one host: for the tests and the measurement of many machines.

    switch ── m0   10.77.0.1      each with network, mounts, processes, host name, /run and
           ├─ m1   10.77.0.2      /dev/shm of its own, and a state folder below the laboratory's
           └─ m2   10.77.0.3

Machines are namespaces of this kernel, so CPU, memory and clock are shared. What happens to the
links (cut, slow, narrow) happens at the switch, a bridge in a namespace of its own: the host's
network is not touched.

Everything of a machine hangs on one process, its first, which ends when this process does,
however it ends: the kernel then ends all others and takes mounts and devices away. What is left
are folders and control groups; the next laboratory below the same folder clears them. Needs root.
Blocking; from one thread.
"""

import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.base.folder_lock import FolderBusyError, only_holder
from nagara.base.linux import CLONE_NEWNET, setns
from nagara.sandbox.cgroups import remove_cgroup

PREFIX = "nagara-lab-"
_LOCK = "laboratory.lock"
_NETWORK = "10.77.0"
_READY_S = 30.0
_FIRST = (
    "mount -t tmpfs run /run && mount -t tmpfs shm /dev/shm && hostname {name}"
    " && ip link set lo up && echo ready && exec {python} -S -c '{waiting}'"
)
# Whoever has lost its parent is this one's child: its end is to be taken note of.
_WAITING = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.stdin.buffer.read()"
)
_UNSHARE = (
    *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
    *("--mount-proc", "--propagation", "private"),
)

_log = logging.getLogger(__name__)


class LaboratoryError(NagaraError):
    """The laboratory cannot be made as asked; the tool's message is in it."""


class Inside:
    """A process inside a machine, beside what started it there."""

    def __init__(self, outer: "subprocess.Popen[bytes]", log: Path) -> None:
        self._outer = outer
        self.log = log
        self.pid = _only_child(outer)  # as this process sees it

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._outer.poll()

    def send(self, number: int) -> None:
        """Sends it a signal; one that has ended is no error."""
        if self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if number != signal.SIGSTOP:  # nsenter stops with its child, and does not see it end
                self._outer.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 30.0) -> int:
        """Asks it to end, kills it when it does not, and returns its exit code."""
        self.send(number)
        try:
            return self._outer.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            return self._outer.wait()

    def said(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text(errors="replace")[-4000:]


class Namespaces:
    """One set of namespaces, alive until `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        program = _FIRST.format(name=name, python=sys.executable, waiting=_WAITING)
        first = ["sh", "-c", program]
        self._outer = subprocess.Popen(
            [*_UNSHARE, *first], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who end it afterwards
        )  # fmt: skip
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != b"ready\n":
            self._outer.wait()
            raise LaboratoryError("no namespaces can be made", where=name, hint="are you root?")
        self.pid = _only_child(self._outer)

    def command(self, argv: Sequence[str], folder: Path | None = None) -> list[str]:
        """What runs `argv` inside."""
        place = () if folder is None else (f"--wdns={folder}",)
        return [
            *("nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts", "--ipc"),
            *(*place, "--", *argv),
        ]

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Runs a program inside to its end and returns what it wrote.

        Raises:
            LaboratoryError: it failed; with what it said.
        """
        return _run(self.command(argv), argv, env)

    def network(self, *argv: str) -> str:
        """The same for what only concerns the network; processes are named as they are outside."""
        return _run(["nsenter", "--target", str(self.pid), "--net", "--", *argv], argv)

    def close(self) -> None:
        """Ends everything inside, and returns when it has ended."""
        if self._outer.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._outer.stdin.close()
        try:
            self._outer.wait(10)
        except subprocess.TimeoutExpired:
            self._outer.kill()
            self._outer.wait()
        if self._outer.stdout is not None:
            self._outer.stdout.close()


class Link:
    """One machine's cable to the switch."""

    def __init__(self, switch: Namespaces, machine: Namespaces, number: int) -> None:
        self._switch = switch
        self._machine = machine
        self._port = f"port{number}"
        self._number = number
        self._wire: subprocess.Popen[bytes] | None = None
        switch.network(
            *("ip", "link", "add", self._port, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(machine.pid)),
            # A machine in another's place has its card, too: its neighbours know where it is.
            *("address", f"02:00:00:00:00:{number:02x}"),
        )
        machine.network("ip", "address", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
        machine.network("ip", "link", "set", "eth0", "up")
        switch.network("ip", "link", "set", self._port, "master", "br0", "up")

    def cut(self) -> None:
        """From now on nothing passes; neither side is told."""
        self._end_wire()
        self._switch.network("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """It is as at first again, but for `shape`."""
        self._end_wire()
        self._switch.network("ip", "link", "set", self._port, "master", "br0")

    def shape(self, gbit_s: float | None) -> None:
        """Bounds both directions; None: as fast as this machine is."""
        for inside, device in ((self._machine, "eth0"), (self._switch, self._port)):
            if gbit_s is None:
                with contextlib.suppress(LaboratoryError):  # it was not bounded
                    inside.network("tc", "qdisc", "del", "dev", device, "root")
                continue
            rate_bytes_s = gbit_s * 125e6
            # Timers of the kernel are good for a millisecond: so much has to fit.
            burst = max(128 << 10, int(rate_bytes_s / 1000))
            inside.network(
                *("tc", "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", f"{int(rate_bytes_s * 8)}bit", "burst", str(burst), "latency", "50ms"),
            )

    def slow(self, *, round_trip_ms: float, loss: float, seed: int = 1) -> None:
        """Delays what passes, half of the time each way, and drops a share of the frames."""
        self._end_wire()
        far, near = f"far{self._number}", f"near{self._number}"
        words = [far, near, str(round_trip_ms / 2000), str(loss), str(seed)]
        self._wire = wire = subprocess.Popen(
            self._switch.command([sys.executable, "-P", "-m", "nagara.cli.lab_wire", *words]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert wire.stdout is not None
        if wire.stdout.readline() != b"ready\n":
            self._end_wire()
            raise LaboratoryError("the slow wire does not work", where=self._machine.name)
        side = f"side{self._number}"
        with contextlib.suppress(LaboratoryError):
            self._switch.network("ip", "link", "add", side, "type", "bridge")
        self._switch.network("ip", "link", "set", side, "up")
        self._switch.network("ip", "link", "set", near, "master", side, "up")
        self._switch.network("ip", "link", "set", self._port, "master", side)
        self._switch.network("ip", "link", "set", far, "master", "br0", "up")

    def _end_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is None:
            return
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.close()
        wire.wait()
        wire.stdout.close()

    def close(self) -> None:
        """Unplugs it."""
        self._end_wire()
        with contextlib.suppress(LaboratoryError):  # the machine has ended, and its end with it
            self._switch.network("ip", "link", "delete", self._port)


class LabMachine:
    """One machine: an address, a state folder, a link, and processes."""

    def __init__(self, folder: Path, spaces: Namespaces, link: Link, number: int) -> None:
        self.name = spaces.name
        self.address = f"{_NETWORK}.{number + 1}"
        self.folder = folder
        self.state = folder / "state"
        self.state.mkdir(parents=True)
        self.link = link
        self.spaces = spaces
        self._begun: list[Inside] = []

    def begin(self, *argv: str, log: str, env: Mapping[str, str] | None = None) -> Inside:
        """Starts a program that goes on; what it writes is added to a file of the machine."""
        path = self.folder / log
        with path.open("ab") as output:
            outer = subprocess.Popen(
                self.spaces.command(argv, self.folder), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **self.environment, **(env or {})},
            )  # fmt: skip
        inside = Inside(outer, path)
        self._begun.append(inside)
        return inside

    def close(self) -> None:
        """Everything inside ends."""
        self.spaces.close()
        self.link.close()
        for inside in self._begun:
            inside.end(signal.SIGKILL)

    def nagara(self, *arguments: str, log: str, env: Mapping[str, str] | None = None) -> Inside:
        """Starts a command of nagara's with this machine's state folder."""
        return self.begin(*self.nagara_command, *arguments, log=log, env=env)

    def run_nagara(self, *arguments: str) -> str:
        """Runs a command of nagara's to its end. Raises `LaboratoryError`."""
        return self.spaces.run(*self.nagara_command, *arguments, env=self.environment)

    @property
    def nagara_command(self) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(self.state))

    @property
    def environment(self) -> dict[str, str]:
        """No other machine's state, and no proxy between machines."""
        return {"NAGARA_STATE": str(self.state), "no_proxy": "*"}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and what it starts, is in this machine's network meanwhile."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/proc/{self.spaces.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(there, CLONE_NEWNET)
            try:
                yield
            finally:
                setns(home, CLONE_NEWNET)
        finally:
            os.close(there)
            os.close(home)

    def small_disk(self, name: str, size_bytes: int) -> Path:
        """A disk of that size at a folder of the state folder; for this machine alone."""
        folder = self.state / name
        folder.mkdir(parents=True, exist_ok=True)
        self.spaces.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "small", str(folder))
        return folder

    def lose_cpu_flags(self, flags: Sequence[str]) -> None:
        """Lets /proc/cpuinfo lack these; what reads it afterwards takes them for missing."""
        lines = []
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, colon, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                value = " " + " ".join(flag for flag in value.split() if flag not in flags)
            lines.append(name + colon + value)
        forged = self.folder / "cpuinfo"
        forged.write_text("\n".join(lines) + "\n")
        self.spaces.run("mount", "--bind", str(forged), "/proc/cpuinfo")


class Laboratory:
    """Machines at one switch."""

    def __init__(self, folder: Path, switch: Namespaces) -> None:
        self.folder = folder
        self.machines: list[LabMachine] = []
        self._switch = switch
        self._made = 0

    def add(self) -> None:
        """One more machine."""
        self.machines.append(self._new(len(self.machines)))

    def renew(self, number: int) -> LabMachine:
        """Ends a machine and puts one with nothing on it in its place, with its address."""
        self.machines[number].close()
        self.machines[number] = new = self._new(number)
        return new

    def _new(self, number: int) -> LabMachine:
        folder = self.folder / f"m{number}"
        while folder.exists():
            self._made += 1
            folder = self.folder / f"m{number}-{self._made}"
        spaces = Namespaces(f"m{number}")
        try:
            link = Link(self._switch, spaces, number)
        except BaseException:
            spaces.close()
            raise
        return LabMachine(folder, spaces, link, number)

    def close(self) -> None:
        """Ends all machines."""
        for machine in self.machines:
            machine.close()


@contextmanager
def laboratory(below: Path, count: int) -> Iterator[Laboratory]:
    """So many machines with nothing on them, for as long as the block lasts.

    Args:
        below: a folder on a disk for the machines' state folders; what a killed laboratory has
            left there is cleared first.

    Raises:
        LaboratoryError: this host cannot make it.
    """
    below.mkdir(parents=True, exist_ok=True)
    clear_leftovers(below)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=below))
    with ExitStack() as held:
        held.enter_context(only_holder(folder, _LOCK, "it is another process's"))
        held.callback(_remove, folder)  # nobody else clears it meanwhile
        switch = Namespaces("switch")
        held.callback(switch.close)
        switch.network("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        switch.network("ip", "link", "set", "br0", "up")
        made = Laboratory(folder, switch)
        held.callback(made.close)
        for _ in range(count):
            made.add()
        yield made


def clear_leftovers(below: Path) -> list[Path]:
    """Removes what laboratories have left whose process was killed; returns their folders."""
    cleared = []
    for folder in sorted(below.glob(f"{PREFIX}*")):
        try:
            with only_holder(folder, _LOCK, "it is in use"):
                _log.info("clearing what a killed laboratory has left in %s", folder)
                _remove(folder)
        except (FolderBusyError, FileNotFoundError):  # in use, or taken down at this moment
            continue
        cleared.append(folder)
    return cleared


def _remove(folder: Path) -> None:
    """Control groups of replicas that were killed with their machines, then the folder.

    No mount can be in it: those of the machines ended with them.
    """
    for part in ("node/replicas", "node/runc"):
        for replica in folder.glob(f"m*/state/{part}/*"):
            remove_cgroup(replica.name)
    shutil.rmtree(folder)


def _run(command: Sequence[str], shown: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        env=None if env is None else {**os.environ, **env},
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise LaboratoryError(said or f"ended with {done.returncode}", where=shlex.join(shown))
    return done.stdout


def _only_child(outer: "subprocess.Popen[bytes]") -> int:
    """The pid of what a process that forks once has started. Raises `LaboratoryError`."""
    deadline_s = time.monotonic() + _READY_S
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    while outer.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.002)
    if outer.poll() is not None:
        return outer.pid  # it has ended already: whoever signals it looks at that first
    raise LaboratoryError("a program was not started", where=shlex.join(map(str, outer.args)))  # type: ignore[arg-type]
