import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadIndexError, ImageError
from nagara.image.folder_import import import_folder
from nagara.image.images import add_image, find_image, remove_image
from nagara.image.lazy_layer import READ_AHEAD_KIB
from nagara.image.mounting import Method
from nagara.image.mounts import device_of, mount_points
from nagara.image.trace import Pack, Trace, write_trace
from nagara.image.tree import Node, new_folder
from nagara.store.collecting import collect_local
from nagara.store.errors import FullError
from nagara.store.names import WHOLE_LIMIT_BYTES, name_bytes
from nagara.store.roots import put_list
from nagara.testing.objects import noise
from nagara.testing.origin import Origin
from nagara.testing.random_trees import make_folder
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


@pytest.mark.parametrize("layer", ["lazy from afar", "lazy", "local"])
def test_a_mount_equals_its_source(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path, layer: str
) -> None:
    machine = make_far_machine() if layer == "lazy from afar" else maker
    target = tmp_path / "mnt"
    mounted = machine.show(target, prefer_lazy=layer != "local")
    if layer == "local":
        assert mounted.is_lazy  # nobody has proven yet that all is here
        machine.fill(mounted)
        machine.hide(target)
        assert not machine.show(target).is_lazy
    assert listing(target) == listing(source)
    assert subprocess.run([target / "bin/true"], timeout=20).returncode == 0


def test_bytes_come_when_they_are_read_and_only_once(
    shown: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    target = tmp_path / "mnt"
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


@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],  # what one seed makes is not smaller for a smaller seed
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 40))
def test_random_trees_round_trip_through_every_kind_of_mount(
    make_machine: MachineMaker,
    make_far_machine: MachineMaker,
    tmp_path: Path,
    far: Origin,
    seed: int,
) -> None:
    run = tempfile.mkdtemp(dir=tmp_path)
    source, target = Path(run) / "source", tmp_path / "mnt"
    make_folder(source, seed, files=100)
    edge = WHOLE_LIMIT_BYTES + seed % 3 - 1  # up to here an object is not in chunks
    (source / "edge").write_bytes(noise(edge, seed))
    maker = make_machine(f"{run}/maker")
    maker.publish(far, maker.add(source).image)
    for method in ("overlay", "tree", "checkout"):
        machine = make_far_machine(f"{run}/{method}", method)
        mounted = machine.show(target)
        assert listing(target) == listing(source), method
        if method == "overlay":
            machine.fill(mounted)
            machine.hide(target)
            assert not machine.show(target).is_lazy
            assert listing(target) == listing(source), "local"
        machine.hide(target)


def test_a_writable_mount_leaves_the_image_alone_and_its_upper_is_an_image_again(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine()
    machine.add(source)
    target, upper = tmp_path / "mnt", tmp_path / "upper"
    mounted = machine.show(target, upper=upper)
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
    machine.hide(target)
    machine.mounts.release(str(target) + "+")
    machine.show(target)
    assert listing(target) == listing(source)


def test_a_trace_brings_everything_a_start_touches_in_a_few_reads(
    make_machine: MachineMaker,
    make_far_machine: MachineMaker,
    source: Path,
    tmp_path: Path,
    far: Origin,
) -> None:
    for number in range(200):
        (source / f"module_{number}").write_bytes(noise(5000, 100 + number))
    maker = make_machine("maker")
    maker.add(source)
    target = tmp_path / "mnt"

    def start() -> None:
        for number in range(0, 200, 2):
            (target / f"module_{number}").read_bytes()
        with (target / "large").open("rb") as file:
            file.seek(40 << 20)
            file.read(10)

    mounted = maker.show(target, prefer_lazy=True)
    start()
    traced = maker.mounts.finish_recording(mounted)
    maker.hide(target)
    assert traced.trace is not None
    maker.publish(far, traced)
    machine = make_far_machine()
    far.counters(reset=True)
    mounted = machine.show(target)
    while machine.mounts.progress(mounted).is_running:
        time.sleep(0.02)
    assert sum(far.counters()["requests"].values()) < 20
    far.kill()
    start()


def test_a_crafted_trace_is_passed_over_and_the_image_shown_all_the_same(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    image = find_image(maker.store(), "image")
    crafted = maker.store().put_bytes(b'{"version": 1, "objects": [["../../x", []]], "packs": []}')
    kept = put_list(maker.store(), [crafted])
    maker.publish(far, replace(image, trace=crafted, trace_list=kept))
    machine, target = make_far_machine(), tmp_path / "mnt"
    mounted = machine.show(target)
    assert machine.mounts.progress(mounted).objects == 0
    assert listing(target) == listing(source)


def test_a_trace_from_outside_fetches_nothing_but_the_images_own(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path, far: Origin
) -> None:
    image, store = find_image(maker.store(), "image"), maker.store()
    own = name_bytes((source / "medium").read_bytes())
    foreign = [store.put_bytes(noise(90_000, 50 + number)) for number in range(3)]
    pack = store.put_bytes(b"".join(store.read(name) for name in (own, *foreign)))
    places = [own.size + number * 90_000 for number in range(3)]
    packs = (Pack(pack, ((own, 0), *zip(foreign, places, strict=True))),)
    crafted = store.put_bytes(
        write_trace(Trace(tuple((name, ()) for name in (*foreign, own)), packs))
    )
    kept = put_list(store, [crafted, pack, *foreign])
    maker.publish(far, replace(image, trace=crafted, trace_list=kept))
    machine, target = make_far_machine(), tmp_path / "mnt"
    mounted = machine.show(target)
    while machine.mounts.progress(mounted).is_running:
        time.sleep(0.01)
    assert machine.store().local.has(own)
    assert not any(machine.store().local.has(name) for name in foreign)


def test_pinned_images_survive_eviction_and_collection(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine = make_machine(settings='{"limit": "90MB"}')
    machine.add(source)
    target = tmp_path / "mnt"
    machine.show(target)
    remove_image(machine.store().local, "image")
    for seed in range(40):
        content = noise(1_000_000, 1000 + seed)
        try:
            machine.store().put_bytes(content)
        except FullError:
            break
    collect_local(machine.store().local, grace_s=-1)
    assert listing(target) == listing(source)
    machine.hide(target)
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
    mounted = machine.show(target, prefer_lazy=True)
    assert listing(target) == listing(source)
    device = device_of(mounted.data_layers[0])
    assert device is not None
    read_ahead = Path(f"/sys/class/bdi/{device[0]}:{device[1]}/read_ahead_kb")
    assert read_ahead.read_text().strip() == str(READ_AHEAD_KIB)
    machine.hide(target)


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
def test_a_writable_layer_over_a_fallback_shows_the_same_tree(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path, method: Method
) -> None:
    machine, target = make_far_machine(method=method), tmp_path / "mnt"
    machine.show(target, upper=tmp_path / "upper")
    shown, expected = listing(target), listing(source)
    for listed in (shown, expected):
        listed.pop(b"")  # the writable layer's own folder
    assert shown == expected
    (target / "small").write_bytes(b"changed")
    machine.hide(target)
    assert [p for p in mount_points(machine.folder) if p.target.parent.parent.name == "tree"] == []
    assert list((machine.folder / "files").glob("copy/*/*")) == []


@pytest.mark.parametrize("method", ["tree", "checkout"])
def test_the_fallbacks_show_layers_too(
    make_machine: MachineMaker, source: Path, tmp_path: Path, method: Method
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
    machine.hide(target)
    machine.mounts.release(str(target) + "+")


@pytest.mark.parametrize("method", ["overlay", "tree", "checkout"])
def test_a_mount_without_a_writable_layer_cannot_be_written(
    maker: Any, make_far_machine: MachineMaker, tmp_path: Path, method: Method
) -> None:
    machine, target = make_far_machine(method=method), tmp_path / "mnt"
    machine.show(target)
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "new").touch()
    assert (target / "small").read_bytes() == b"inline"


def test_a_daemon_keeps_nothing_about_a_holder_that_is_gone(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine, target = make_far_machine(), tmp_path / "mnt"
    mounted = machine.show(target)
    machine.fill(mounted)
    assert (target / "medium").read_bytes() == (source / "medium").read_bytes()
    assert machine.mounts.progress(mounted).objects > 0
    machine.hide(target)
    assert machine.mounts.progress(mounted).objects == 0
    assert machine.mounts.touches(mounted) == []
