"""Folders on a file system that can carry overlay's marks, and machines that mount images."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nagara.image.content_writer import ContentWriter
from nagara.image.folder_import import import_folder
from nagara.image.images import Added, Image, add_image, find_image
from nagara.image.mounting import ImageMounts, Method, MountedImage
from nagara.image.mounts import mount_points, unmount_if_mounted, unmount_tree
from nagara.image.prefetch import boot_id
from nagara.sandbox.keeper_client import KeeperClient
from nagara.sandbox.kept_descriptors import KeptDescriptors
from nagara.store.configured import open_folder, open_store
from nagara.store.local import ObjectFolder
from nagara.store.moving import push
from nagara.store.store import Store
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise
from nagara.testing.origin import Origin, running_origin


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Path]:
    """A folder below which tests mount; nothing stays mounted there."""
    yield tmp_path
    unmount_tree(tmp_path)
    assert mount_points(tmp_path) == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store without tiers."""
    folder = ObjectFolder(tmp_path / "store")
    opened = Store(folder.tenant("default"))
    yield opened
    opened.close()
    folder.close()


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A keeper's socket."""
    path = tmp_path_factory.mktemp("keeper") / "keeper.sock"
    subprocess.run([sys.executable, "-m", "nagara.sandbox.keeper", str(path)], check=True)
    for _ in range(500):
        if path.exists():
            break
        time.sleep(0.01)
    yield path
    asyncio.run(KeeperClient(path).shutdown())  # it is nobody's child


class Machine:
    """One machine's object folder and image mounts."""

    def __init__(self, folder: Path, keeper: Path, method: Method = "overlay") -> None:
        self.folder = folder
        self.keeper = KeptDescriptors(keeper)
        self.daemon_program: tuple[str, ...] = ("-m", "nagara.cli.files_daemon")
        self.objects = open_folder(folder / "store")
        self.mounts = ImageMounts(
            folder / "files",
            self.objects,
            lambda tenant: open_store(self.objects, tenant),
            self.keeper,
            lambda tenant: (
                sys.executable, *self.daemon_program,
                str(folder / "store"), tenant, str(keeper),
            ),
            method=method,
        )  # fmt: skip

    def store(self, tenant: str = "default") -> Store:
        return self.mounts.store(tenant)

    def add(self, source: Path, name: str = "image") -> Added:
        with ContentWriter(self.store()) as writer:
            tree = import_folder(source, writer)
        return add_image(self.store(), name, tree, f"dir:{source}", new=writer.new)

    def publish(self, far: Origin, image: Image) -> None:
        """Puts an image where other machines find it."""
        push(self.store(), FolderTier(far.root, "default"), image.to_root())

    def show(
        self,
        target: Path,
        name: str = "image",
        *,
        upper: Path | None = None,
        **options: Any,
    ) -> MountedImage:
        """Mounts an image, for everybody to see; with `upper` it can be written."""
        target.mkdir(parents=True, exist_ok=True)
        work = None
        if upper is not None:
            work = upper.with_name(upper.name + ".work")
            for folder in (upper, work):
                folder.mkdir(exist_ok=True)
        image = find_image(self.store(), name)
        mounted = self.mounts.mount("default", image, str(target), **options)
        self.mounts.mount_at(mounted, target, upper=upper, work=work)
        return mounted

    def hide(self, target: Path) -> None:
        """Unmounts it and lets go of the image."""
        assert unmount_if_mounted(target)
        self.mounts.release(str(target))

    def fill(self, mounted: MountedImage) -> None:
        """Waits until everything is here, so that the next mount is local."""
        self.mounts.fill(mounted)
        deadline_s = time.monotonic() + 60
        complete = self.objects.ledger.is_complete
        while not complete("default", str(mounted.image.list), boot_id()):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def daemon_pid(self, tenant: str = "default") -> int:
        return int(self.mounts.lazy_layer(tenant).ask({"op": "ping"})["pid"])


MachineMaker = Callable[..., Machine]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Origin]:
    """An origin that machines can have as their tier."""
    (tmp_path / "far").mkdir()
    with running_origin(tmp_path / "far") as origin:
        yield origin


@pytest.fixture
def make_machine(tmp_path: Path, keeper: Path) -> Iterator[Callable[..., Machine]]:
    """Machines below the test's folder; afterwards nothing of them is mounted or running."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made: list[Machine] = []

    def make(
        name: str = "machine", settings: str | None = None, method: Method = "overlay"
    ) -> Machine:
        folder = tmp_path / name
        (folder / "store").mkdir(parents=True, exist_ok=True)
        if settings is not None:
            (folder / "store/settings.json").write_text(settings)
        made.append(Machine(folder, keeper, method))
        return made[-1]

    yield make
    unmount_tree(tmp_path / "mnt")
    for machine in made:
        machine.mounts.reconcile(())  # what a test did not release, whole trees by FUSE among it
        for tenant in machine.objects.tenant_names():
            with contextlib.suppress(Exception):
                machine.mounts.lazy_layer(tenant).unmount()
        unmount_tree(machine.folder)
        machine.mounts.close()
        machine.objects.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with some of everything, one file of it in chunks."""
    folder = tmp_path / "source"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/true").write_bytes(Path("/bin/true").read_bytes())
    (folder / "bin/true").chmod(0o755)
    (folder / "folder").mkdir()
    (folder / "folder/in it").write_bytes(noise(70_000, 3))
    (folder / "small").write_bytes(b"inline")
    (folder / "empty").touch()
    (folder / "medium").write_bytes(noise(300_000))
    (folder / "large").write_bytes(noise((64 << 20) + 4321, 1))
    (folder / "link").symlink_to("medium")
    if os.geteuid() == 0:
        _add_what_only_root_makes(folder)
    return folder


def _add_what_only_root_makes(folder: Path) -> None:
    os.link(folder / "medium", folder / "hard")
    os.setxattr(folder / "small", "user.note", b"x" * 3000)
    os.setxattr(folder / "medium", "trusted.overlay.opaque", b"y")
    os.mkfifo(folder / "fifo")
    os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
    os.chown(folder / "medium", 1234, 5678)
    os.utime(folder / "small", ns=(1, 1_600_000_000_123_456_789))


@pytest.fixture
def make_far_machine(make_machine: MachineMaker, far: Origin) -> MachineMaker:
    """Machines that have nothing but an origin: `(name="other", method="overlay")`."""
    settings = json.dumps({"tiers": [{"kind": "http", "url": far.url}]})

    def make(name: str = "other", method: Method = "overlay") -> Machine:
        made: Machine = make_machine(name, settings, method)
        return made

    return make


@pytest.fixture
def maker(make_machine: MachineMaker, source: Path, far: Origin) -> Machine:
    """The machine that made the image of `source` and put it on the origin."""
    made: Machine = make_machine("maker")
    made.publish(far, made.add(source).image)
    return made


@pytest.fixture
def shown(maker: Machine, make_far_machine: MachineMaker, tmp_path: Path) -> Machine:
    """Another machine that shows that image at `mnt` and has read nothing of it."""
    machine: Machine = make_far_machine()
    machine.show(tmp_path / "mnt")
    return machine
