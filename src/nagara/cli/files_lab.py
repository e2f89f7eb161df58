"""Machines, origins and cold caches for `nagara bench files`.

A *machine* here is a state folder of its own with its own keeper, daemon and mounts, so that it
has never seen an object. The origin is a process of its own with a set latency. Needs root.
"""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nagara.image.content_writer import ContentWriter
from nagara.image.folder_import import import_folder
from nagara.image.images import Image, add_image, find_image
from nagara.image.mounting import ImageMounts, MountedImage
from nagara.image.mounts import unmount_if_mounted
from nagara.image.tracing import STARTS_RECORDED
from nagara.node.image_mounts import daemon_command
from nagara.sandbox.keeper_client import KeeperClient
from nagara.sandbox.kept_descriptors import KeptDescriptors
from nagara.store.configured import open_folder, open_store
from nagara.store.local import DEFAULT_TENANT
from nagara.store.moving import push
from nagara.store.names import parse_name
from nagara.store.roots import write_root
from nagara.store.store import Store
from nagara.store.tier import FolderTier


class Origin:
    """A running origin over a folder, whose latency can be set."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._port = port

    def behave(self, *, latency_ms: float = 0.0, link_bytes_s: float | None = None) -> None:
        body = {"latency_s": latency_ms / 1000, "link_bytes_s": link_bytes_s}
        self._ask("PUT", "/-/behaviour", json.dumps(body).encode())

    def counters(self) -> dict[str, Any]:
        """Since the last call: `{"bytes", "requests": {key: count}}`."""
        counted: dict[str, Any] = json.loads(self._ask("DELETE", "/-/counters", b""))
        return counted

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def running_origin(folder: Path) -> Iterator[Origin]:
    """An origin process; ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "nagara.testing.origin", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield Origin(folder, int(process.stdout.readline()))
        finally:
            process.kill()


class LabMachine:
    """One machine with nothing on it but what it is given.

    Its files stay until the lab ends, their pages do not: ext4 steps over every inode that was
    removed a moment ago, and memory that a virtual machine never used before comes slowly. Either
    would be measured with the next machine.
    """

    def __init__(self, folder: Path, keeper: Path, tiers: list[dict[str, Any]]) -> None:
        (folder / "store").mkdir(parents=True)
        (folder / "store/settings.json").write_text(json.dumps({"tiers": tiers}))
        self.folder = folder
        self.objects = open_folder(folder / "store")
        self.mounts = ImageMounts(
            folder / "files",
            self.objects,
            lambda tenant: open_store(self.objects, tenant),
            KeptDescriptors(keeper),
            lambda tenant: daemon_command(self.objects.path, tenant, keeper),
        )
        self.target = folder / "mnt"
        self.target.mkdir()

    @property
    def store(self) -> Store:
        return self.mounts.store(DEFAULT_TENANT)

    def add(self, source: Path, name: str) -> Image:
        with ContentWriter(self.store) as writer:
            tree = import_folder(source, writer)
        return add_image(self.store, name, tree, f"dir:{source}", new=writer.new).image

    def publish(self, origin: Origin, name: str) -> None:
        image = find_image(self.store, name)
        push(self.store, FolderTier(origin.folder, DEFAULT_TENANT), image.to_root())

    def end_recording(self, name: str) -> None:
        """From now on a start of the image is not one of the first, which are recorded."""
        image = replace(find_image(self.store, name), starts=STARTS_RECORDED)
        write_root(self.store.local, image.to_root())

    def prove(self) -> None:
        """Everything here was checked, and that is recorded."""
        local = self.store.local
        for path in local.objects.iterdir():
            local.verify(parse_name(path.name))
        self.objects.syncer.flush()

    def show(self, name: str, *, prefer_lazy: bool = True) -> MountedImage:
        """Mounts an image at `target`."""
        image = find_image(self.store, name)
        mounted = self.mounts.mount(
            DEFAULT_TENANT, image, str(self.target), prefer_lazy=prefer_lazy
        )
        self.mounts.mount_at(mounted, self.target)
        return mounted

    def hide(self) -> None:
        unmount_if_mounted(self.target)
        self.mounts.release(str(self.target))

    def close(self) -> None:
        self.hide()
        self.mounts.lazy_layer(DEFAULT_TENANT).unmount()
        self.mounts.close()
        self.objects.close()
        forget_pages(self.folder)


@dataclass
class Lab:
    """A folder for everything, a keeper, and machines one after another."""

    folder: Path
    keeper: Path
    _count: int = 0

    @contextmanager
    def machine(self, origin: Origin | None = None) -> Iterator[LabMachine]:
        self._count += 1
        tiers = [{"kind": "http", "url": origin.url}] if origin is not None else []
        made = LabMachine(self.folder / f"m{self._count}", self.keeper, tiers)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def opened_lab(folder: Path) -> Iterator[Lab]:
    """The lab below `folder`; nothing of it is left afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    keeper = KeeperClient(folder / "keeper.sock")
    asyncio.run(keeper.ensure())
    try:
        yield Lab(folder, folder / "keeper.sock")
    finally:
        asyncio.run(keeper.shutdown())  # it is nobody's child
        shutil.rmtree(folder, ignore_errors=True)


def forget_pages(folder: Path) -> None:
    """Drops a tree's contents from the page cache: what follows is a cold read of them."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def needed_packages(module: str) -> list[Path]:
    """The folders and files of site-packages that an import of the module loads something from."""
    script = (
        f"import {module}, json, sys\n"
        "files = [getattr(m, '__file__', None) for m in list(sys.modules.values())]\n"
        "files += [line.split()[-1] for line in open('/proc/self/maps')]\n"
        "print(json.dumps([f for f in files if f]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    found = set()
    for text in json.loads(done.stdout.splitlines()[-1]):
        before, name, inner = text.rpartition("/site-packages/")
        if name:
            found.add(Path(before + name) / inner.partition("/")[0])
    return sorted(path for path in found if path.exists())


def timed_import(tree: Path, module: str) -> tuple[float, int]:
    """Seconds of an interpreter that imports a module from a tree; bytes it had to read from disk.

    Byte code is neither written nor looked for elsewhere: both sides read the same files.
    """
    script = (
        f"import {module}, resource, sys\n"
        "sys.stdout.write(open('/proc/self/io').read().split('read_bytes: ')[1].split()[0])"
    )
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
    }
    begun_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return time.perf_counter() - begun_s, int(done.stdout.split()[-1])
