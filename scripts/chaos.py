"""The chaos run: clients of all kinds while whatever can be killed is killed, and disks fill.

    python scripts/chaos.py --seconds 600 [--seed N]

Needs root: `nagara up` runs with containers on a small file system of its own. Exit code 0 only if
no request was answered wrongly, done twice or failed without a fault to explain it, and nothing is
left on the machine. Faults, one at a time, at random: a replica, the node agent, the file daemon or
the control process is killed (SIGKILL), or the disk of the state is full for a while.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
import chaos_image
from chaos_check import Call, Fault, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
APP = (Path(__file__).parent / "chaos_app.py").read_text()
DISK_BYTES = 1500 * 2**20
FULL_S = 4.0
SETTLE_S, QUIET_S = 15.0, 15.0
START_S, END_S = 120.0, 120.0
PAUSES_S = (2.0, 7.0)
CLIENTS = {"read": 3, "work": 3, "stream": 2, "ws": 2}


class Machine:
    """`nagara up` on a disk of its own, and the ways to break it."""

    def __init__(self, folder: Path) -> None:
        self._mount = folder / "mount"
        self.state = self._mount / "state"
        self._copies = folder / "ledger"
        self._marker = f"chaos-{secrets.token_hex(6)}"
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._up: subprocess.Popen[bytes] | None = None
        self._log = folder / "up.log"
        self._copies.mkdir()
        self._folder = folder

    def begin(self) -> None:
        """Brings it up and waits until it serves."""
        command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(self.state)]
        with self._log.open("ab") as log:
            self._up = subprocess.Popen(
                [*command, "up", "--port", str(self._port), "--auth", "off"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_until_up(self) -> None:
        """Returns when it takes connections."""
        end_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                assert self._up is not None
                if self._up.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"nagara did not come up:\n{self.said()}") from None
                time.sleep(0.1)
            else:
                return

    def prepare(self) -> None:
        """The state's disk, with the tools that are there already."""
        self._mount.mkdir()
        disk = self._mount.parent / "disk"
        with disk.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(disk)], check=True)
        subprocess.run(["mount", "-o", "loop", str(disk), str(self._mount)], check=True)
        self.state.mkdir()
        chaos_image.write_tier(self.state, chaos_image.make_image(self._folder))
        tools = Path(os.environ.get("NAGARA_STATE", ROOT / ".state")) / "tools"
        if tools.exists():
            (self.state / "tools").symlink_to(tools.resolve())

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A sub-command, to its end."""
        command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(self.state)]
        return subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=END_S, check=False,
        )  # fmt: skip

    def deploy(self) -> None:
        """The app, two replicas at most, so that all of them are needed at times."""
        file = self.state / "chaos.toml"
        file.write_text(
            f'[app.chaos]\nimage = "image:{chaos_image.NAME}"\n'
            f"command = {json.dumps(['python', '-c', APP, '${PORT}', self._marker])}\n"
            'ready = "/canary"\nscale = {max = 2, concurrency = 6, idle = "20s"}\n'
            'snapshot = {canary = {path = "/canary"}}\ntimeouts = {queue = "60s"}\n'
        )
        done = self.run("deploy", str(file))
        if done.returncode:
            raise SystemExit(f"the app was not deployed: {done.stderr}\n{self.said()}")

    def end(self) -> int:
        """Ends it in order."""
        assert self._up is not None
        self._up.send_signal(signal.SIGTERM)
        return self._up.wait(END_S)

    def discard(self) -> None:
        """Whatever is left of it: the machine is left to others as it was."""
        if self._up is not None and self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        if _leaks(self):  # only after a failure: it ends what it finds
            self.begin()
            self.wait_until_up()
            self.end()
        subprocess.run(["umount", "-R", str(self._mount)], check=False)

    def said(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(errors="replace")[-3000:]

    # -- faults ----------------------------------------------------------------------------

    def kill_replica(self) -> list[str]:
        """One of them, by the process that serves; its name."""
        pids = self._processes(self._marker)
        if not pids:
            return []
        chosen = random.choice(pids)  # noqa: S311 - chance, no secret
        try:
            found = re.search(r"-(chaos-[\w-]+)", Path(f"/proc/{chosen}/cgroup").read_text())
        except OSError:
            return []
        return [found[1]] if found and _kill([chosen]) else []

    def kill_agent(self) -> list[str]:
        """The node agent; the control process starts it again."""
        return _kill(self._processes("nagara.cli.main", str(self.state), "agent"))

    def kill_daemon(self) -> list[str]:
        """The daemon behind the images' files, if there is one."""
        return _kill(self._processes("nagara.cli.files_daemon", str(self.state)))

    def kill_control(self) -> list[str]:
        """The control process, which a supervisor would start again."""
        assert self._up is not None
        self._up.kill()
        self._up.wait()
        time.sleep(0.2)
        self.begin()
        self.wait_until_up()
        return [""]

    def fill_disk(self) -> list[str]:
        """Nothing can be written for a while."""
        filler = self.state / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))
            time.sleep(FULL_S)
        finally:
            filler.unlink(missing_ok=True)
        return [""]

    def _processes(self, *words: str) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                is_ours = all(any(word in part for part in line) for word in words)
                if is_ours and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found

    # -- the ledger ------------------------------------------------------------------------

    def keep_ledger(self) -> None:
        """Holds on to what replicas wrote, also when nagara forgets it."""
        for log in (self.state / "node" / "logs").glob("*/chaos/*.log*"):
            with contextlib.suppress(OSError):
                text = log.read_bytes()
                copy = self._copies / log.name
                if len(text) > (copy.stat().st_size if copy.exists() else -1):
                    copy.write_bytes(text)

    def ledger(self) -> tuple[Counter[str], Counter[str]]:
        """How often the app began and ended each request."""
        self.keep_ledger()
        entries: dict[str, Counter[str]] = {"begin": Counter(), "end": Counter()}
        for copy in self._copies.iterdir():
            for line in copy.read_text(errors="replace").splitlines():
                words = line.split()
                if len(words) == 3 and words[0] == "LEDGER" and words[1] in entries:
                    entries[words[1]][words[2]] += 1
        return entries["begin"], entries["end"]


def _kill(pids: list[int]) -> list[str]:
    """Kills one of them; nothing if there is none."""
    if not pids:
        return []
    with contextlib.suppress(ProcessLookupError):
        os.kill(random.choice(pids), signal.SIGKILL)  # noqa: S311 - chance, no secret
    return [""]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


# -- clients -------------------------------------------------------------------------------


class Client:
    """One client that asks again and again until it is told to stop."""

    def __init__(self, machine: Machine, kind: str, calls: list[Call], seed: int) -> None:
        self._machine, self._kind, self._calls = machine, kind, calls
        self._chance = random.Random(seed)  # noqa: S311
        self._ask = {
            "read": self._read, "work": self._work, "stream": self._stream, "ws": self._talk,
        }[kind]  # fmt: skip

    async def run(self, is_over: asyncio.Event) -> None:
        """A new connection from time to time, as clients have."""
        while not is_over.is_set():
            timeout = aiohttp.ClientTimeout(total=180)
            async with aiohttp.ClientSession(self._machine.url, timeout=timeout) as session:
                for _ in range(20):
                    if is_over.is_set():
                        return
                    await self._one(session)
                    await asyncio.sleep(self._chance.random() * 0.2)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        id_ = secrets.token_hex(8)
        begun_s = time.monotonic()
        try:
            found = await self._ask(session, id_)
        except (aiohttp.ClientError, TimeoutError, OSError):
            found = {"status": None, "is_whole": False}
            await asyncio.sleep(0.1)  # nobody asks a dead server without a pause
        self._calls.append(Call(id_, self._kind, begun_s, time.monotonic(), **found))

    async def _read(self, session: aiohttp.ClientSession, id_: str) -> dict[str, Any]:
        async with session.get(f"/chaos/read/{id_}") as answer:
            if answer.status != 200:
                return await _refused(answer)
            return {"status": 200, "is_right": await answer.text() == f"read {id_}"}

    async def _work(self, session: aiohttp.ClientSession, id_: str) -> dict[str, Any]:
        body = self._chance.randbytes(self._chance.choice([10, 10_000, 300_000]))
        expected = {"id": id_, "sha256": hashlib.sha256(body).hexdigest()}
        async with session.post(f"/chaos/deed/{id_}", data=body) as answer:
            if answer.status != 200:
                return await _refused(answer)
            return {"status": 200, "is_right": await answer.json() == expected}

    async def _stream(self, session: aiohttp.ClientSession, id_: str) -> dict[str, Any]:
        events = [f"data: {id_} {number}\n\n" for number in range(10)]
        whole = "".join([*events, "data: end\n\n"]).encode()
        received = b""
        async with session.get(f"/chaos/stream/{id_}") as answer:
            if answer.status != 200:
                return await _refused(answer)
            try:
                async for piece in answer.content.iter_any():
                    received += piece
            except (aiohttp.ClientError, OSError):
                is_right = whole.startswith(received)
                replica = answer.headers.get("x-nagara-replica", "")
                return {
                    "status": 200, "is_whole": False, "is_right": is_right, "replica": replica
                }  # fmt: skip
        # It ended as if it were whole: then it must be.
        return {"status": 200, "is_right": received == whole}

    async def _talk(self, session: aiohttp.ClientSession, id_: str) -> dict[str, Any]:
        said = 0
        try:
            async with session.ws_connect(f"/chaos/ws/{id_}") as talk:
                for said in range(5):
                    await talk.send_str(str(said))
                    message = await talk.receive(60)
                    if message.type is not aiohttp.WSMsgType.TEXT:
                        return {"status": 101, "is_whole": False}
                    if message.data != f"{id_} {said}":
                        return {"status": 101, "is_right": False}
                    await asyncio.sleep(0.02)
        except aiohttp.WSServerHandshakeError as error:
            return {"status": error.status, "code": _code_of(error), "is_whole": False}
        return {"status": 101}


async def _refused(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        error = json.loads(await answer.read())["error"]
        code = error["code"] if error["message"] else ""
    except (ValueError, KeyError, TypeError):
        code = "no reason given"
    replica = answer.headers.get("x-nagara-replica", "")
    return {"status": answer.status, "code": code, "is_whole": False, "replica": replica}


def _code_of(error: aiohttp.WSServerHandshakeError) -> str:
    """A refused handshake has no body here: its status stands for the reason."""
    return {502: "replica_failed", 503: "unreachable", 504: "request_timeout"}.get(error.status, "")


# -- the run -------------------------------------------------------------------------------


async def _break(
    machine: Machine, chance: random.Random, faults: list[Fault], seconds: float
) -> None:
    """One fault after the other for as long as the run lasts.

    A way to break something tells the replica's name, "" for other things, nothing if there was
    nothing to break.
    """
    ways: dict[str, tuple[int, Callable[[], list[str]]]] = {
        "replica": (5, machine.kill_replica),
        "agent": (2, machine.kill_agent),
        "daemon": (2, machine.kill_daemon),
        "control": (2, machine.kill_control),
        "disk": (1, machine.fill_disk),
    }
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        await asyncio.sleep(chance.uniform(*PAUSES_S))
        (kind,) = chance.choices(list(ways), [weight for weight, _ in ways.values()])
        begun_s = time.monotonic()
        for replica in await asyncio.to_thread(ways[kind][1]):
            faults.append(Fault(kind, begun_s, time.monotonic(), replica))
            sys.stderr.write(f"{kind} ")
            sys.stderr.flush()


async def _keep_ledger(machine: Machine, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        await asyncio.to_thread(machine.keep_ledger)
        await asyncio.sleep(0.5)


async def _is_served(machine: Machine) -> None:
    """Returns when a request is answered."""
    end_s = time.monotonic() + START_S
    async with aiohttp.ClientSession(machine.url) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get("/chaos/read/warm") as answer:
                    if answer.status == 200:
                        return
            if time.monotonic() > end_s:
                raise SystemExit(f"the app was never served:\n{machine.said()}")
            await asyncio.sleep(0.2)


async def run(machine: Machine, seconds: float, seed: int) -> tuple[list[Call], list[Fault], float]:
    """Clients and faults, then clients alone: calls, faults, and from when on it is quiet."""
    calls: list[Call] = []
    faults: list[Fault] = []
    is_over, is_kept = asyncio.Event(), asyncio.Event()
    await _is_served(machine)
    kinds = [kind for kind, count in CLIENTS.items() for _ in range(count)]
    clients = [Client(machine, kind, calls, seed + n) for n, kind in enumerate(kinds)]
    running = [asyncio.create_task(client.run(is_over)) for client in clients]
    keeping = asyncio.create_task(_keep_ledger(machine, is_kept))
    await _break(machine, random.Random(seed), faults, seconds)  # noqa: S311
    await _is_served(machine)
    await asyncio.sleep(SETTLE_S)
    settled_s = time.monotonic()
    await asyncio.sleep(QUIET_S)
    is_over.set()
    await asyncio.gather(*running)
    is_kept.set()
    await keeping
    return calls, faults, settled_s


def _leaks(machine: Machine) -> list[str]:
    done = machine.run("doctor", "--leaks", "--json")
    try:
        return [json.dumps(thing) for thing in json.loads(done.stdout)["owned"]]
    except ValueError:
        return [f"leaks cannot be listed: {done.stderr}"]


def _print(verdict: Verdict, faults: list[Fault], leaks: list[str]) -> None:
    kinds = Counter(fault.kind for fault in faults)
    print(f"faults: {', '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'none'}")
    share = 100 * verdict.failed / max(1, verdict.calls)
    print(f"requests: {verdict.calls}, failed {verdict.failed} ({share:.2f} %)")
    print(f"slowest answer without a fault: {verdict.slowest_s:.1f} s")
    print(f"answers: {', '.join(f'{n} {name}' for name, n in verdict.answers.most_common())}")
    for line in [*verdict.wrong[:20], *(f"left over: {leak}" for leak in leaks)]:
        print(f"WRONG {line}")
    print("all is well" if not verdict.wrong and not leaks else "NOT well")


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("the chaos run needs root")
    print(f"seed {chosen.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="nagara-chaos-"))
    machine = Machine(folder)
    try:
        machine.prepare()
        machine.begin()
        machine.wait_until_up()
        machine.deploy()
        calls, faults, settled_s = asyncio.run(run(machine, chosen.seconds, chosen.seed))
        code = machine.end()
        begun, ended = machine.ledger()
        verdict = judge(calls, begun, ended, faults, settled_s)
        leaks = _leaks(machine)
        if code:
            verdict.wrong.append(f"nagara up ended with {code}:\n{machine.said()}")
        _print(verdict, faults, leaks)
        if verdict.wrong or leaks:
            print(machine.said())
        sys.exit(bool(verdict.wrong or leaks))
    finally:
        machine.discard()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
