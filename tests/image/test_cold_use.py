"""What programs do with a tree they have never read: execute, seek in folders, read on and on."""

import ctypes
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nagara.base.linux import mount
from nagara.image.images import find_image
from nagara.store.moving import push
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin, running_origin
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
# All of them answer --version and do nothing else then.
_PROGRAMS = [
    "basename", "cat", "chmod", "cp", "cut", "date", "df", "dirname", "du", "echo", "env", "expr",
    "find", "fold", "grep", "gzip", "head", "id", "install", "join", "ln", "ls", "md5sum",
    "mkdir", "mv", "nl", "od", "paste", "pr", "printenv", "readlink", "realpath", "rm", "sed",
    "seq", "sha256sum", "sleep", "sort", "split", "stat", "sum", "tac", "tail", "tar", "tee",
    "touch", "tr", "tsort", "uname", "uniq", "wc", "yes",
]  # fmt: skip


@pytest.fixture
def origin(tmp_path: Path) -> Any:
    (tmp_path / "origin").mkdir()
    with running_origin(tmp_path / "origin") as origin:
        yield origin


@pytest.fixture
def imported(make_machine: Callable[..., Any], origin: Origin) -> Callable[..., Any]:
    """Imports a folder on one machine and gives another one that finds it at the origin."""

    def to_another(source: Path, **settings: Any) -> Any:
        maker = make_machine("maker")
        push(maker.store(), FolderTier(origin.root, "default"), maker.add(source).image.to_root())
        settings = {"tiers": [{"kind": "http", "url": origin.url}], **settings}
        method = settings.pop("method", "overlay")
        return make_machine("other", json.dumps(settings), method)

    return to_another


def show(machine: Any, target: Path, upper: Path | None = None) -> Path:
    """The image at `target`; writable with `upper`."""
    target.mkdir(parents=True)
    mounted = machine.mounts.mount("default", find_image(machine.store(), "image"), str(target))
    work = upper and upper.with_name("work")
    for folder in filter(None, (upper, work)):
        folder.mkdir()
    machine.mounts.mount_at(mounted, target, upper=upper, work=work)
    return target


def test_every_program_runs_from_a_cold_tree(
    imported: Callable[..., Any], tmp_path: Path, origin: Origin
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for program in _PROGRAMS:
        found = Path("/usr/bin", program)
        if found.is_file() and found.read_bytes()[:4] == b"\x7fELF":
            (source / program).write_bytes(found.read_bytes())
            (source / program).chmod(0o755)
    programs = sorted(path.name for path in source.iterdir())
    assert len(programs) > 20
    target = show(imported(source), tmp_path / "mnt")
    origin.behave(Behaviour(latency_s=0.01))

    def run(program: str) -> tuple[str, int, bytes]:
        done = subprocess.run([target / program, "--version"], capture_output=True, timeout=60)
        return program, done.returncode, done.stderr

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, programs))
    assert found == [(program, 0, b"") for program in programs]


class _Entry(ctypes.Structure):
    """struct dirent of 64-bit Linux."""

    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("length", ctypes.c_ushort),
        ("kind", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


class Folder:
    """A folder opened with the C library, which Python hides."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.opendir.restype = ctypes.c_void_p
        self._c.readdir.restype = ctypes.POINTER(_Entry)
        self._c.telldir.restype = ctypes.c_long
        self._at = ctypes.c_void_p(self._c.opendir(os.fsencode(path)))
        assert self._at.value

    def read(self) -> bytes | None:
        ctypes.set_errno(0)
        entry = self._c.readdir(self._at)
        assert entry or ctypes.get_errno() == 0
        return bytes(entry.contents.name) if entry else None

    def tell(self) -> int:
        return int(self._c.telldir(self._at))

    def seek(self, place: int) -> None:
        self._c.seekdir(self._at, ctypes.c_long(place))

    def rewind(self) -> None:
        self._c.rewinddir(self._at)

    def close(self) -> None:
        self._c.closedir(self._at)


@pytest.mark.parametrize(
    ("method", "is_writable"),
    [("overlay", False), ("overlay", True), ("tree", False), ("tree", True)],
)
def test_a_large_folder_can_be_read_from_any_place_of_it(
    imported: Callable[..., Any], tmp_path: Path, method: str, is_writable: bool
) -> None:
    source = tmp_path / "source"
    (source / "many").mkdir(parents=True)
    names = {b".", b".."}
    for number in range(3000):
        name = f"{number}-{'n' * (number % 200)}"
        (source / "many" / name).touch()
        names.add(name.encode())
    machine = imported(source, method=method)
    target = show(machine, tmp_path / "mnt", tmp_path / "upper" if is_writable else None)
    if is_writable:  # a merged folder, which overlay lists itself
        (target / "many/new").touch()
        names.add(b"new")
    folder = Folder(target / "many")
    try:
        places, order = [], []
        while True:
            places.append(folder.tell())
            name = folder.read()
            if name is None:
                break
            order.append(name)
        assert set(order) == names
        assert len(order) == len(names)
        rng = random.Random(1)
        for _ in range(300):
            number = rng.randrange(len(order))
            folder.seek(places[number])
            assert folder.read() == order[number]
            if number + 1 < len(order):
                assert folder.read() == order[number + 1]
        folder.seek(places[-1])
        assert folder.read() is None
        folder.rewind()
        assert [folder.read() for _ in order] == order
    finally:
        folder.close()
        subprocess.run(["umount", str(target)], check=True)
        machine.mounts.release(str(target))


_READ_ALL = """
import sys, threading
def read(path):
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass
threads = [threading.Thread(target=read, args=(path,)) for path in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_many_sequential_readers_keep_the_daemon_within_its_budget(
    imported: Callable[..., Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    readers, size = 64, 8 << 20
    for number in range(readers):
        (source / f"file-{number}").write_bytes(noise(size, number))
    machine = imported(source, budget="8MiB")
    target = show(machine, tmp_path / "mnt")

    def most_kib() -> int:
        status = Path(f"/proc/{machine.daemon_pid()}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    before = most_kib()
    paths = [str(target / f"file-{number}") for number in range(readers)]
    subprocess.run([sys.executable, "-c", _READ_ALL, *paths], check=True, timeout=300)
    # The budget, answers of a megabyte, and threads; the objects together are 512 MiB.
    assert most_kib() - before < 200 << 10
    assert (target / "file-1").read_bytes() == noise(size, 1)


def test_a_disk_smaller_than_the_image_passes_it_by(
    imported: Callable[..., Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(12):
        (source / f"file-{number}").write_bytes(noise(1 << 20, number))
    (source / "large").write_bytes(noise((64 << 20) + 5000))
    (tmp_path / "other/store").mkdir(parents=True)
    mount("nagara-test", tmp_path / "other/store", "tmpfs", 0, "size=8m")
    machine = imported(source)
    target = show(machine, tmp_path / "mnt")
    assert listing(target) == listing(source)
