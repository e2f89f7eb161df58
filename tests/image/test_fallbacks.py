import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nagara.base.linux import MNT_DETACH, MS_NODEV, MS_RDONLY, mount, unmount
from nagara.image.checkout import check_out
from nagara.image.content_writer import ContentWriter
from nagara.image.folder_import import import_folder
from nagara.image.fuse_channel import FuseChannel
from nagara.image.probing import FilesCapabilities, probe
from nagara.image.tree_files import TreeFiles
from nagara.store.store import Store
from nagara.testing.random_trees import make_folder
from nagara.testing.trees import listing

pytestmark = pytest.mark.root


@pytest.mark.parametrize("seed", range(3))
def test_a_checkout_equals_its_source(store: Store, tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_folder(source, seed)
    with ContentWriter(store) as writer:
        tree = import_folder(source, writer)
    done = check_out(store, tree, target)
    assert done.left_out == ()
    assert listing(target) == listing(source)
    with pytest.raises(FileExistsError):
        check_out(store, tree, target)


def test_a_write_to_a_checkout_does_not_reach_the_object(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_bytes(b"x" * 5000)
    with ContentWriter(store) as writer:
        tree = import_folder(source, writer)
    check_out(store, tree, tmp_path / "target")
    (tmp_path / "target/f").write_bytes(b"y" * 5000)
    assert tree.kids is not None
    name = tree.kids[b"f"].content
    assert name is not None
    assert store.read(name) == b"x" * 5000


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_tree_by_fuse_equals_its_source(store: Store, tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_folder(source, seed)
    many = source / "many"
    many.mkdir()
    for number in range(3000):
        (many / f"{number}-{'n' * (number % 200)}").touch()
    with ContentWriter(store) as writer:
        tree = import_folder(source, writer)
    target.mkdir()
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,max_read=1048576"
    mount("test", target, "fuse", MS_RDONLY | MS_NODEV, options)
    channel = FuseChannel(descriptor, TreeFiles(store, tree), time_limit_s=20)
    thread = threading.Thread(target=channel.run, kwargs={"is_takeover": False}, daemon=True)
    thread.start()
    script = (
        "import sys, pickle\nfrom pathlib import Path\nfrom nagara.testing.trees import listing\n"
        "pickle.dump(listing(Path(sys.argv[1])), sys.stdout.buffer)"
    )
    try:
        # By another process: one that serves a mount must not wait for it.

        done = subprocess.run(
            [sys.executable, "-c", script, str(target)], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr.decode()
        shown = pickle.loads(done.stdout)
    finally:
        unmount(target, MNT_DETACH)
        time.sleep(0.05)
        thread.join(5)
        os.close(descriptor)
    assert shown == listing(source)


def test_what_can_be_mounted_is_found_by_trying(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.root
    if found.handover and found.fuse:  # a kernel from 6.9 on has all that is needed
        assert found.method() == "overlay"
    assert list(tmp_path.iterdir()) == []
    assert {each.name for each in found.described()} >= {"root", "FUSE"}


@pytest.mark.parametrize(
    ("absent", "method"),
    [
        ((), "overlay"),
        (("erofs_file",), "overlay"),
        (("erofs_file", "erofs_loop"), "tree"),
        (("overlay_data",), "tree"),
        (("overlay_data", "fuse"), "checkout"),
        (("fuse",), "checkout"),
        (("root",), "checkout"),
    ],
)
def test_the_method_follows_from_what_is_there(absent: tuple[str, ...], method: str) -> None:
    every = {name: name not in absent for name in FilesCapabilities.__dataclass_fields__}
    assert FilesCapabilities(**every).method() == method
