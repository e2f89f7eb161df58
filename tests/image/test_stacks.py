"""Several images on top of one another, read-only and below a writable layer."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import UnrepresentableError
from nagara.image.folder_import import import_folder
from nagara.image.frozen import freeze
from nagara.image.images import find_image
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounts import mount_erofs, mount_points
from nagara.testing.objects import noise
from nagara.testing.trees import listing

pytestmark = pytest.mark.root


class Stack:
    """An app's image and a model's above it, held by one holder each, with a writable layer."""

    def __init__(self, machine: Any, folder: Path, *, prefer_lazy: bool) -> None:
        self.folder = folder
        for name, files in (("app", ("etc/config", "bin/tool")), ("model", ("models/m/weights",))):
            source = folder / f"{name}-source"
            for number, file in enumerate(files):
                (source / file).parent.mkdir(parents=True, exist_ok=True)
                (source / file).write_bytes(noise(70_000, number))
            machine.add(source, name)
        images = [find_image(machine.store(), name) for name in ("model", "app")]
        mounted = [
            machine.mounts.mount("default", image, image.name, prefer_lazy=prefer_lazy)
            for image in images
        ]
        self.layers = [layer for each in mounted for layer in each.layers]
        self.data = list(dict.fromkeys(layer for each in mounted for layer in each.data_layers))

    def show(self, name: str, above: tuple[Path, ...] = ()) -> Path:
        root, upper, work = (self.folder / name / part for part in ("root", "upper", "work"))
        for each in (root, upper, work):
            each.mkdir(parents=True)
        layers = [*above, *self.layers]
        mount_overlay_on(layers, root, data=self.data, upper=upper, work=work)
        return root


@pytest.mark.parametrize("prefer_lazy", [True, False])
def test_a_writable_layer_above_two_images_shows_and_keeps_everything(
    make_machine: Callable[..., Any], tmp_path: Path, prefer_lazy: bool
) -> None:
    folder = tmp_path / "mnt"
    stack = Stack(make_machine(), folder, prefer_lazy=prefer_lazy)
    root = stack.show("first")
    for file, seed in (("etc/config", 0), ("bin/tool", 1), ("models/m/weights", 0)):
        assert (root / file).read_bytes() == noise(70_000, seed)
    (root / "models/m/weights").chmod(0o600)
    os.chown(root / "bin/tool", 7, 8)
    subprocess.run(["mv", str(root / "etc"), str(root / "conf")], check=True)
    (root / "new").write_bytes(noise(9000))
    expected = listing(root)
    subprocess.run(["umount", str(root)], check=True)
    # Frozen, as a snapshot does it, and put above the same stack again.
    freeze(folder / "first/upper", folder / "layer.erofs")
    (folder / "frozen").mkdir()
    mount_erofs(folder / "layer.erofs", folder / "frozen")
    shown = listing(stack.show("second", above=(folder / "frozen",)))
    assert shown.keys() == expected.keys()
    for path in expected:
        assert path == b"" or shown[path] == expected[path]


def test_what_a_layer_above_two_images_cannot_say_elsewhere_is_named(
    make_machine: Callable[..., Any], tmp_path: Path
) -> None:
    machine = make_machine()
    root = Stack(machine, tmp_path / "mnt", prefer_lazy=False).show("first")
    (root / "models/m/weights").chmod(0o600)
    with ContentWriter(machine.store()) as writer, pytest.raises(UnrepresentableError) as caught:
        import_folder(tmp_path / "mnt/first/upper", writer, is_layer=True)
    assert "models/m/weights" in str(caught.value)


def test_an_index_is_mounted_once_for_all_its_holders_and_goes_with_the_last(
    make_machine: Callable[..., Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(noise(9000))
    machine = make_machine()
    image = machine.add(source).image

    def indices() -> list[Path]:
        return [point.target for point in mount_points(machine.folder) if point.kind == "erofs"]

    first = machine.mounts.mount("default", image, "first")
    second = machine.mounts.mount("default", image, "second")
    assert indices() == list(first.layers) == list(second.layers)
    assert first.layers[0].stat().st_dev == second.layers[0].stat().st_dev
    machine.mounts.release("first")
    assert indices() == list(second.layers)
    assert (second.layers[0] / "file").exists()
    machine.mounts.release("first")  # again: it holds nothing any more
    assert indices() == list(second.layers)
    machine.mounts.release("second")
    assert indices() == []
    assert not second.layers[0].exists()
