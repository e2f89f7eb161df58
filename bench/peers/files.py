"""The same tree and the same import through other file systems: cold and warm.

    python bench/peers/files.py --packages DIR --module pandas [--runs 3] [--json]

Peers: squashfs in the kernel, squashfuse, fuse-overlayfs over a plain copy, an rclone mount and a
casync mount of a local store; the last two also over HTTP from another process on loopback that
answers after 0 and 5 ms. Each is measured if its programs are installed
(apt-get install squashfs-tools squashfuse fuse-overlayfs rclone casync) and named as absent
otherwise. Needs root. Cold means: the pages of everything below the work folder were dropped and
the mount is new; how much was then read from the disk is not proven here, since most peers cache
in other processes.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from nagara.cli.files_lab import forget_pages, timed_import
from nagara.testing.origin import Behaviour, running_origin

_WAIT_S = 30.0
Mounted = Callable[[], AbstractContextManager[Path]]


class AbsentError(Exception):
    """The peer's program is not here, or does not work here; its text says which."""


def run(*command: str | Path) -> None:
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    except FileNotFoundError:
        raise AbsentError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise AbsentError(f"{command[0]}: {done.stderr.strip()[-200:]}")


def wait_mounted(target: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not os.path.ismount(target):
        if process.poll() is not None:
            raise AbsentError(f"ended: {log.read_text(errors='replace').strip()[-200:]}")
        if time.monotonic() > deadline_s:
            raise AbsentError("did not mount in time")
        time.sleep(0.02)


@contextmanager
def unmounting(target: Path) -> Iterator[Path]:
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], capture_output=True)


@contextmanager
def background(target: Path, *command: str | Path) -> Iterator[Path]:
    """A mount that a process in the foreground serves."""
    if shutil.which(str(command[0])) is None:
        raise AbsentError(f"{command[0]} is not installed")
    with unmounting(target):
        log = target.with_name("said")
        with log.open("wb") as said:
            process = subprocess.Popen(
                [str(c) for c in command], stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        try:
            wait_mounted(target, process, log)
            yield target
        finally:
            subprocess.run(["umount", "-l", str(target)], capture_output=True)
            process.kill()
            process.wait()


class SlowDoor:
    """Passes connections on to a port of this machine; every request waits before it goes on."""

    def __init__(self, behind: int, latency_s: float) -> None:
        self._behind = behind
        self._latency_s = latency_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> "SlowDoor":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._behind))
            for source, sink, pause_s in ((client, server, self._latency_s), (server, client, 0.0)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, pause_s), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, pause_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                time.sleep(pause_s)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_listening(port: int) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise AbsentError("its server did not start in time") from None
            time.sleep(0.05)


class Peers:
    """The tree in each peer's form, made once; mounting it anew for each run."""

    def __init__(self, work: Path, tree: Path) -> None:
        self.work = work
        self.tree = tree
        self.target = work / "mnt"
        self._prepared: set[str] = set()

    def once(self, name: str, *command: str | Path) -> None:
        if name not in self._prepared:
            run(*command)
            self._prepared.add(name)

    @contextmanager
    def native(self) -> Iterator[Path]:
        yield self.tree

    @contextmanager
    def squashfs(self) -> Iterator[Path]:
        image = self._squashed()
        with unmounting(self.target):
            run("mount", "-t", "squashfs", "-o", "loop,ro", image, self.target)
            yield self.target

    @contextmanager
    def squashfuse(self) -> Iterator[Path]:
        with background(self.target, "squashfuse", "-f", self._squashed(), self.target) as target:
            yield target

    @contextmanager
    def fuse_overlayfs(self) -> Iterator[Path]:
        options = f"lowerdir={self.tree}"
        command = ("fuse-overlayfs", "-f", "-o", options, self.target)
        with background(self.target, *command) as target:
            yield target

    @contextmanager
    def rclone_mount(self) -> Iterator[Path]:
        with self._rclone(str(self.tree)) as target:
            yield target

    @contextmanager
    def casync_mount(self) -> Iterator[Path]:
        store, index = self._made_for_casync()
        command = ("casync", "mount", f"--store={store}", index, self.target)
        with background(self.target, *command) as target:
            yield target

    def rclone_over_http(self, latency_ms: float) -> Mounted:
        """rclone needs listings: its own server gives them, behind something slow."""

        @contextmanager
        def mounted() -> Iterator[Path]:
            port = free_port()
            server = subprocess.Popen(
                ["rclone", "serve", "http", str(self.tree), "--addr", f"127.0.0.1:{port}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                wait_listening(port)
                with (
                    SlowDoor(port, latency_ms / 1000) as door,
                    self._rclone(":http:", "--http-url", f"http://127.0.0.1:{door.port}") as target,
                ):
                    yield target
            finally:
                server.kill()
                server.wait()

        return mounted

    def casync_over_http(self, latency_ms: float) -> Mounted:
        @contextmanager
        def mounted() -> Iterator[Path]:
            self._made_for_casync()
            with running_origin(self.work) as origin:
                origin.behave(Behaviour(latency_s=latency_ms / 1000))
                store = f"--store={origin.url}/store.castr"
                command = ("casync", "mount", store, self.work / "tree.caidx", self.target)
                with background(self.target, *command) as target:
                    yield target

        return mounted

    @contextmanager
    def _rclone(self, remote: str, *options: str) -> Iterator[Path]:
        cache = self.work / "rclone-cache"
        shutil.rmtree(cache, ignore_errors=True)
        command = (
            "rclone", "mount", remote, str(self.target), "--read-only", "--vfs-cache-mode", "full",
            "--cache-dir", str(cache), "--dir-cache-time", "1h", "--config", "/dev/null", *options,
        )  # fmt: skip
        with background(self.target, *command) as target:
            yield target

    def _made_for_casync(self) -> tuple[Path, Path]:
        store, index = self.work / "store.castr", self.work / "tree.caidx"
        self.once("casync", "casync", "make", f"--store={store}", index, self.tree)
        return store, index

    def _squashed(self) -> Path:
        image = self.work / "tree.squashfs"
        self.once("squashfs", "mksquashfs", self.tree, image, "-comp", "zstd", "-quiet")
        return image


def measure(peers: Peers, mounted: Mounted, module: str, runs: int) -> dict[str, object]:
    cold, warm = [], []
    try:
        with mounted():
            pass  # what is made once is made now
        for _ in range(runs):
            forget_pages(peers.work)
            begun_s = time.perf_counter()
            with mounted() as target:
                timed_import(target, module)
                cold.append(time.perf_counter() - begun_s)
                warm.append(min(timed_import(target, module)[0] for _ in range(2)))
    except (AbsentError, subprocess.SubprocessError) as error:
        return {"absent": str(error)[:300]}
    return {
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "load": os.getloadavg()[0],  # of others too: figures suffer from it
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Other file systems, measured the same way.")
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--module", default="pandas")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("mounting needs root")
    with tempfile.TemporaryDirectory(prefix="nagara-peers-") as folder:
        work = Path(folder)
        shutil.copytree(options.packages, work / "tree", symlinks=True)
        peers = Peers(work, work / "tree")
        every = {
            "native": peers.native,
            "squashfs": peers.squashfs,
            "squashfuse": peers.squashfuse,
            "fuse-overlayfs": peers.fuse_overlayfs,
            "rclone mount": peers.rclone_mount,
            "casync mount": peers.casync_mount,
            "rclone mount over http, 0 ms": peers.rclone_over_http(0),
            "rclone mount over http, 5 ms": peers.rclone_over_http(5),
            "casync mount over http, 0 ms": peers.casync_over_http(0),
            "casync mount over http, 5 ms": peers.casync_over_http(5),
        }
        result = {}
        for name, mounted in every.items():
            result[name] = measure(peers, mounted, options.module, options.runs)
            print(name, result[name], file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, figures in result.items():
            if "absent" in figures:
                print(f"{name:<30} absent: {figures['absent']}")
            else:
                print(
                    f"{name:<30} cold {figures['cold_s']:6.2f} s   warm {figures['warm_s']:6.2f} s"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
