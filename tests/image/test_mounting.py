import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadIndexError, ImageError
from nagara.image.folder_import import import_folder
from nagara.image.images import add_image, find_image, remove_image
from nagara.image.lazy_layer import READ_AHEAD_KIB
from nagara.image.mounts import device_of, mount_points
from nagara.image.prefetch import boot_id
from nagara.image.tree import Node, new_folder
from nagara.store.collecting import collect_local
from nagara.store.errors import FullError
from nagara.store.moving import push
from nagara.store.tier import FolderTier
from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin
from nagara.testing.random_trees import make_folder
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
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
    os.link(folder / "medium", folder / "hard")
    os.setxattr(folder / "small", "user.note", b"x" * 3000)
    os.setxattr(folder / "medium", "trusted.overlay.opaque", b"y")
    os.mkfifo(folder / "fifo")
    os.mknod(folder / "null", 0o020666, os.makedev(1, 3))
    os.chown(folder / "medium", 1234, 5678)
    os.utime(folder / "small", ns=(1, 1_600_000_000_123_456_789))
    return folder


def settings_for(origin: Origin) -> str:
    return json.dumps({"tiers": [{"kind": "http", "url": origin.url}]})


def publish(make_machine: MachineMaker, source: Path, far: Origin) -> Any:
    """Imports on one machine and puts it where others find it."""
    maker = make_machine("maker")
    image = maker.add(source).image
    push(maker.store(), FolderTier(far.root, "default"), image.to_root())
    return maker


def show(machine: Any, target: Path, name: str = "image", **options: Any) -> Any:
    return machine.show(target, name, **options)


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


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_round_trip(
    make_machine: MachineMaker, tmp_path: Path, far: Origin, seed: int
) -> None:
    source = tmp_path / "random"
    make_folder(source, seed)
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    assert listing(target) == listing(source)


def test_readers_from_many_processes_see_the_source_while_the_origin_misbehaves(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far))
    target = tmp_path / "mnt"
    show(machine, target)
    far.behave(Behaviour(latency_s=0.002, share=0.3, truncate_after=1000, times=40))
    script = Path(__file__).parent / "random_reader.py"
    readers = [
        subprocess.Popen([sys.executable, str(script), str(source), str(target), str(seed)])
        for seed in range(16)
    ]
    assert [reader.wait(timeout=150) for reader in readers] == [0] * 16


def test_a_writable_mount_leaves_the_image_alone_and_its_upper_is_an_image_again(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine()
    machine.add(source)
    target, upper, work = tmp_path / "mnt", tmp_path / "upper", tmp_path / "work"
    for folder in (target, upper, work):
        folder.mkdir()
    image = find_image(machine.store(), "image")
    mounted = machine.mounts.mount("default", image, str(target))
    machine.mounts.mount_at(mounted, target, upper=upper, work=work)
    (target / "small").write_bytes(b"changed")
    (target / "medium").unlink()
    subprocess.run(["rm", "-r", str(target / "bin")], check=True)
    (target / "bin").mkdir()
    (target / "bin/new").write_bytes(noise(9000, 5))
    (target / "fifo").unlink()
    # What overlay would write down as a mark, if it could.
    (target / "empty").chmod(0o600)
    (target / "hard").chmod(0o640)
    os.chown(target / "large", 77, 88)
    os.setxattr(target / "hard", "user.note", b"new")
    subprocess.run(["mv", str(target / "folder"), str(target / "moved")], check=True)
    (target / "moved/in it").rename(target / "moved/renamed")
    expected = listing(target)
    subprocess.run(["umount", str(target)], check=True)
    with ContentWriter(machine.store()) as writer:
        tree = import_folder(upper, writer, is_layer=True)
    layer = add_image(machine.store(), "layer", tree, "layer:", is_layer=True).image
    above = machine.mounts.mount("default", layer, str(target) + "+")
    machine.mounts.mount_at(mounted, target, above=[above])
    shown = listing(target)
    assert shown.keys() == expected.keys()
    for path in expected:  # marks of overlay itself do not show
        assert shown[path][:9] == expected[path][:9] or path == b""
        assert shown[path][10] == expected[path][10]
    subprocess.run(["umount", str(target)], check=True)
    machine.mounts.release(str(target))
    machine.mounts.release(str(target) + "+")
    show(machine, target)
    assert listing(target) == listing(source)


def test_a_trace_brings_everything_a_start_touches_in_a_few_reads(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    for number in range(200):
        (source / f"module_{number}").write_bytes(noise(5000, 100 + number))
    maker = publish(make_machine, source, far)
    target = tmp_path / "mnt"

    def start() -> None:
        for number in range(0, 200, 2):
            (target / f"module_{number}").read_bytes()
        with (target / "large").open("rb") as file:
            file.seek(40 << 20)
            file.read(10)

    mounted = show(maker, target, prefer_lazy=True)
    start()
    traced = maker.mounts.finish_recording(mounted)
    subprocess.run(["umount", str(target)], check=True)
    assert traced.trace is not None
    push(maker.store(), FolderTier(far.root, "default"), traced.to_root())
    machine = make_machine("other", settings_for(far))
    far.counters(reset=True)
    mounted = show(machine, target)
    while machine.mounts.progress(mounted).left:
        time.sleep(0.02)
    assert sum(far.counters()["requests"].values()) < 20
    far.kill()
    start()


def test_pinned_images_survive_eviction_and_collection(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine(settings='{"limit": "90MB"}')
    machine.add(source)
    target = tmp_path / "mnt"
    show(machine, target)
    remove_image(machine.store().local, "image")
    for seed in range(40):
        content = noise(1_000_000, 1000 + seed)
        try:
            machine.store().put_bytes(content)
        except FullError:
            break
    collect_local(machine.store().local, grace_s=-1)
    assert listing(target) == listing(source)
    subprocess.run(["umount", str(target)], check=True)
    machine.mounts.release(str(target))
    assert collect_local(machine.store().local, grace_s=-1).kept == 0


def test_one_tenants_image_cannot_show_anothers_objects(
    make_machine: MachineMaker, tmp_path: Path
) -> None:
    machine = make_machine()
    secret = machine.store("a").put_bytes(b"secret of a" * 1000)
    tree = new_folder()
    assert tree.kids is not None
    tree.kids[b"stolen"] = Node(0o100644, size=secret.size, content=secret)
    image = add_image(machine.store("b"), "thief", tree, "a test").image
    target = tmp_path / "mnt"
    target.mkdir()
    mounted = machine.mounts.mount("b", image, str(target))
    machine.mounts.mount_at(mounted, target)
    with pytest.raises(OSError, match="Input/output error"):
        (target / "stolen").read_bytes()
    machine.store("b").put_bytes(b"secret of a" * 1000)  # who has the bytes may have the name
    assert (target / "stolen").read_bytes() == b"secret of a" * 1000


def test_paths_with_colons_commas_and_great_length_are_mounted(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine("a:b,c d\\e" + "/long" * 60)
    machine.add(source)
    target = tmp_path / "mnt" / "m:n,o"
    mounted = show(machine, target, prefer_lazy=True)
    assert listing(target) == listing(source)
    device = device_of(mounted.data_layers[0])
    assert device is not None
    read_ahead = Path(f"/sys/class/bdi/{device[0]}:{device[1]}/read_ahead_kb")
    assert read_ahead.read_text().strip() == str(READ_AHEAD_KIB)
    subprocess.run(["umount", str(target)], check=True)


def test_an_index_from_outside_is_read_before_the_kernel_reads_it(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine()
    image = machine.add(source).image
    raw = bytearray(machine.store().read(image.index))
    raw[1152 + 5] ^= 0xF0  # the root's type
    bad = machine.store().put_bytes(bytes(raw))
    crafted = replace(image, index=bad)
    with pytest.raises(BadIndexError):
        machine.mounts.mount("default", crafted, "holder")
    foreign = machine.store().put_bytes(noise(5000, 77))
    tree = new_folder()
    assert tree.kids is not None
    tree.kids[b"x"] = Node(0o100644, size=5000, content=foreign)
    other = add_image(machine.store(), "other", tree, "a test").image
    with pytest.raises(ImageError, match="list does not keep"):
        machine.mounts.mount("default", replace(other, list=image.list), "holder")
    assert machine.objects.ledger.pins() == []


@pytest.mark.parametrize("method", ["tree", "checkout"])
def test_the_fallbacks_show_layers_too(
    make_machine: MachineMaker, source: Path, tmp_path: Path, method: str
) -> None:
    machine = make_machine(method=method)
    machine.add(source)
    upper = tmp_path / "upper"
    (upper / "folder").mkdir(parents=True)
    os.setxattr(upper / "folder", "trusted.overlay.opaque", b"y")
    os.mknod(upper / "medium", 0o020000, os.makedev(0, 0))
    (upper / "new").write_bytes(noise(9000, 5))
    with ContentWriter(machine.store()) as writer:
        tree = import_folder(upper, writer, is_layer=True)
    layer = add_image(machine.store(), "layer", tree, "layer:", is_layer=True).image
    target = tmp_path / "mnt"
    target.mkdir()
    below = machine.mounts.mount("default", find_image(machine.store(), "image"), str(target))
    above = machine.mounts.mount("default", layer, str(target) + "+")
    machine.mounts.mount_at(below, target, above=[above])
    assert not (target / "medium").exists()
    assert list((target / "folder").iterdir()) == []
    assert (target / "new").read_bytes() == noise(9000, 5)
    assert (target / "large").read_bytes() == (source / "large").read_bytes()
    subprocess.run(["umount", str(target)], check=True)
    machine.mounts.release(str(target))
    machine.mounts.release(str(target) + "+")


@pytest.mark.parametrize("method", ["tree", "checkout"])
def test_the_fallbacks_show_the_same_tree(
    make_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin, method: str
) -> None:
    publish(make_machine, source, far)
    machine = make_machine("other", settings_for(far), method)
    target, upper, work = tmp_path / "mnt", tmp_path / "upper", tmp_path / "work"
    for folder in (target, upper, work):
        folder.mkdir()
    image = find_image(machine.store(), "image")
    mounted = machine.mounts.mount("default", image, str(target))
    machine.mounts.mount_at(mounted, target, upper=upper, work=work)
    shown, expected = listing(target), listing(source)
    for listed in (shown, expected):
        listed.pop(b"")  # the writable layer's own folder
    assert shown == expected
    (target / "small").write_bytes(b"changed")
    subprocess.run(["umount", str(target)], check=True)
    machine.mounts.release(str(target))
    assert [p for p in mount_points(machine.folder) if p.target.parent.parent.name == "tree"] == []
    assert list((machine.folder / "files").glob("copy/*/*")) == []
