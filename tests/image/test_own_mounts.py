"""What nagara keeps and mounts is no source: it would wait for itself, or be half an image."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.image.errors import SourceError
from nagara.image.sources import import_image
from nagara.testing.objects import noise

pytestmark = pytest.mark.root


def test_parts_of_a_mount_and_the_store_are_refused(
    make_machine: Callable[..., Any], tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    (source / "file").write_bytes(noise(9000))
    machine = make_machine()
    machine.add(source)
    mounted = machine.show(target, prefer_lazy=True)
    (tmp_path / "link").symlink_to(machine.objects.path)
    parts = (*mounted.layers, *mounted.data_layers, machine.objects.path / "tenants")
    for part in (*parts, machine.folder, tmp_path, tmp_path / "link"):
        with pytest.raises(SourceError, match="belongs to nagara itself"):
            import_image(machine.store(), f"dir:{part}", "again")
    # The whole that replicas see is a tree like any other.
    added, _ = import_image(machine.store(), f"dir:{target}", "again")
    assert added.objects == 1
