"""Mounting trees, with paths that break naive option strings."""

import os

import pytest

from nagara.image.mounts import (
    MountError,
    device_of,
    mount_overlay,
    mount_points,
    unmount_if_mounted,
    unmount_tree,
)

pytestmark = pytest.mark.root
NAMES = ("plain", "a,b", "a:b", "a\\b", "a b", "a,upperdir=b", "tab\tand\nline", "üñ", "#x", "\\:",
         "line\u2028end\x0b\x85", os.fsdecode(b"\xff"))  # fmt: skip


def overlay(folder, lower_count=1):
    """An overlay below `folder`: lower layers L0 (topmost), L1, ... with a file each."""
    lower = [folder / f"L{number}" for number in range(lower_count)]
    for layer in lower:
        layer.mkdir(parents=True)
        (layer / layer.name).write_text(layer.name)
        (layer / "shared").write_text(layer.name)
    for part in ("upper", "work", "root"):
        (folder / part).mkdir()
    mount_overlay(lower, folder / "upper", folder / "work", folder / "root")
    return folder / "root"


@pytest.mark.parametrize("name", NAMES)
def test_any_path_can_be_a_layer(mounts, name):
    root = overlay(mounts / name, lower_count=2)
    assert (root / "L0").read_text() == "L0"
    assert (root / "L1").read_text() == "L1"
    (root / "new").write_text("new")
    assert (mounts / name / "upper/new").read_text() == "new"


@pytest.mark.parametrize("name", NAMES)
def test_any_path_is_found_and_unmounted(mounts, name):
    root = overlay(mounts / name)
    assert [point.target for point in mount_points(mounts / name)] == [root]
    device = root.stat().st_dev
    assert device_of(root) == (os.major(device), os.minor(device))
    assert unmount_tree(mounts / name) == 1
    assert list(root.iterdir()) == []


def test_the_first_layer_is_the_topmost(mounts):
    assert (overlay(mounts, lower_count=3) / "shared").read_text() == "L0"


def test_paths_too_long_for_one_mount_are_refused_by_us(mounts):
    folder = mounts / ("x" * 200)
    with pytest.raises(MountError, match="too long for one mount"):
        overlay(folder, lower_count=20)


def test_a_refused_mount_says_why_and_where(mounts):
    with pytest.raises(MountError, match="No such file") as caught:
        mount_overlay([mounts / "none"], mounts / "u", mounts / "w", mounts)
    assert str(mounts) in str(caught.value)


def test_unmounting_what_is_not_mounted_is_no_error(mounts):
    assert unmount_if_mounted(mounts) is False
    assert unmount_if_mounted(mounts / "none") is False


def test_a_mount_in_use_is_taken_away_all_the_same(mounts):
    root = overlay(mounts)
    with (root / "L0").open() as held:
        assert unmount_if_mounted(root)
        assert mount_points(mounts) == []
        assert held.read() == "L0"


def test_a_link_to_a_mount_is_not_followed(mounts):
    root = overlay(mounts / "a")
    (mounts / "link").symlink_to(root)
    assert unmount_if_mounted(mounts / "link") is False
    assert len(mount_points(mounts)) == 1


def test_mounts_on_mounts_go_deepest_first(mounts):
    root = overlay(mounts / "a")
    (root / "inner").mkdir()
    outside = mounts / "b"
    for part in ("lower", "upper", "work"):
        (outside / part).mkdir(parents=True)
    mount_overlay([outside / "lower"], outside / "upper", outside / "work", root / "inner")
    assert unmount_tree(mounts / "a") == 2
