import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.image.images import find_image
from nagara.image.prefetch import boot_id
from nagara.store.moving import push
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin, running_origin
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/true").write_bytes(Path("/bin/true").read_bytes())
    (folder / "bin/true").chmod(0o755)
    (folder / "small").write_bytes(b"inline")
    (folder / "empty").touch()
    (folder / "medium").write_bytes(noise(300_000))
    (folder / "large").write_bytes(noise((64 << 20) + 4321, 1))
    (folder / "link").symlink_to("medium")
    os.link(folder / "medium", folder / "hard")
    os.setxattr(folder / "small", "user.note", b"x" * 3000)
    os.setxattr(folder / "medium", "trusted.overlay.opaque", b"y")
    os.mkfifo(folder / "fifo")
    os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
    os.chown(folder / "medium", 1234, 5678)
    os.utime(folder / "small", ns=(1, 1_600_000_000_123_456_789))
    return folder


@pytest.fixture
def far(tmp_path: Path) -> Any:
    (tmp_path / "far").mkdir()
    with running_origin(tmp_path / "far") as origin:
        yield origin


def settings_for(origin: Origin) -> str:
    return json.dumps({"tiers": [{"kind": "http", "url": origin.url}]})


def publish(make_machine: MachineMaker, source: Path, far: Origin) -> Any:
    """Imports on one machine and puts it where others find it."""
    maker = make_machine("maker")
    image = maker.add(source).image
    push(maker.store(), FolderTier(far.root, "default"), image.to_root())
    return maker


def show(machine: Any, target: Path, name: str = "image", **options: Any) -> Any:
    target.mkdir(parents=True, exist_ok=True)
    image = find_image(machine.store(), name)
    mounted = machine.mounts.mount("default", image, str(target), **options)
    machine.mounts.mount_at(mounted, target)
    return mounted


@pytest.mark.parametrize("layer", ["lazy from afar", "lazy", "local"])
def test_a_mount_equals_its_source(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin, layer: str
) -> None:
    machine = publish(make_machine, source, far)
    if layer == "lazy from afar":
        machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    mounted = show(machine, target, prefer_lazy=layer != "local")
    if layer == "local":
        assert mounted.is_lazy  # nobody has proven yet that all is here
        machine.mounts.fill(mounted)
        while not machine.objects.ledger.is_complete("default", str(mounted.image.list), boot_id()):
            time.sleep(0.02)
        subprocess.run(["umount", str(target)], check=True)
        machine.mounts.release(str(target))
        mounted = show(machine, target)
        assert not mounted.is_lazy
    assert listing(target) == listing(source)
    assert subprocess.run([target / "bin/true"], timeout=20).returncode == 0
    subprocess.run(["umount", str(target)], check=True)


def test_bytes_come_when_they_are_read_and_only_once(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    far.counters(reset=True)
    assert sorted(path.name for path in target.iterdir()) == sorted(
        path.name for path in source.iterdir()
    )
    assert (target / "small").read_bytes() == b"inline"
    assert far.counters()["requests"] == {}
    for _ in range(2):
        assert (target / "medium").read_bytes() == noise(300_000)
    with (target / "large").open("rb") as file:
        file.seek(30 << 20)
        file.read(10)
    assert sum(far.counters()["requests"].values()) < 16
    assert far.counters()["bytes"] < 60 << 20


def test_a_killed_daemon_is_replaced_and_old_handles_and_mappings_go_on(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    machine.mounts.lazy_layer("default").supervise()
    content = noise((64 << 20) + 4321, 1)
    with (target / "large").open("rb", buffering=0) as handle:
        mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert handle.read(100) == content[:100]
        far.behave(Behaviour(latency_s=0.3))
        script = "import sys; sys.stdout.buffer.write(open(sys.argv[1],'rb').read())"
        blocked = subprocess.Popen(
            [sys.executable, "-c", script, str(target / "medium")], stdout=subprocess.PIPE
        )
        time.sleep(0.2)
        first = machine.daemon_pid()
        os.kill(first, signal.SIGKILL)
        assert blocked.communicate(timeout=60)[0] == noise(300_000)
        far.behave(Behaviour())
        assert os.pread(handle.fileno(), 1000, 50 << 20) == content[50 << 20 : (50 << 20) + 1000]
        assert mapping[40 << 20 : (40 << 20) + 100] == content[40 << 20 : (40 << 20) + 100]
        assert machine.daemon_pid() != first
        mapping.close()
    assert listing(target) == listing(source)


def test_a_reader_killed_while_the_origin_stalls_dies_at_once(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    for file in ("medium", "large"):
        far.behave(Behaviour(stall_after=0))
        far.counters(reset=True)
        script = "import sys; open(sys.argv[1],'rb').read()"
        reader = subprocess.Popen([sys.executable, "-c", script, str(target / file)])
        while not far.counters()["requests"]:
            time.sleep(0.02)
        time.sleep(0.1)
        reader.kill()
        assert reader.wait(timeout=2) == -signal.SIGKILL
        far.behave(Behaviour())
    assert (target / "medium").read_bytes() == noise(300_000)


@pytest.mark.parametrize(
    "fault", [Behaviour(lie=True), Behaviour(status=503), Behaviour(truncate_after=10)]
)
def test_what_cannot_be_had_is_an_error_and_never_wrong_bytes(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin, fault: Behaviour
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    far.behave(fault)
    with pytest.raises(OSError, match="Input/output error"):
        (target / "medium").read_bytes()
    far.behave(Behaviour())
    assert (target / "medium").read_bytes() == noise(300_000)
