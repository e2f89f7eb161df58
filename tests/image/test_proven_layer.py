"""Large objects that were proven are read past the daemon of a lazy mount."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nagara.image.images import find_image
from nagara.image.tracing import STARTS_RECORDED
from nagara.store.names import parse_name
from nagara.store.roots import write_root
from nagara.testing.origin import Origin
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


def known(machine: Any, starts: int = STARTS_RECORDED) -> None:
    """The image's first starts are over."""
    image = replace(find_image(machine.store(), "image"), starts=starts)
    write_root(machine.store().local, image.to_root())


def through_daemon(machine: Any) -> int:
    """Bytes of objects that the daemon opened or fetched."""
    return sum(report.read_bytes for report in machine.mounts.tier_reports("default"))


def offered(machine: Any) -> list[Path]:
    folder = machine.store().local.proven.folder
    return [path for path in folder.iterdir() if path.name != ".lock"]


def test_a_large_object_that_is_proven_is_read_past_the_daemon(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine, target = make_machine(), tmp_path / "mnt"
    machine.add(source)
    known(machine)
    mounted = machine.show(target, prefer_lazy=True)
    assert mounted.is_lazy
    before = through_daemon(machine)
    assert (target / "large").read_bytes() == (source / "large").read_bytes()
    assert through_daemon(machine) == before
    assert listing(target) == listing(source)
    assert through_daemon(machine) > before  # all the rest
    machine.hide(target)


def test_a_start_that_is_recorded_asks_the_daemon_for_everything(
    make_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    machine, target = make_machine(), tmp_path / "mnt"
    machine.add(source)
    mounted = machine.show(target, prefer_lazy=True)
    assert (target / "large").read_bytes() == (source / "large").read_bytes()
    traced = machine.mounts.touches(mounted)
    assert {chunk for name, chunk in traced if name.is_chunked} == set(range(17))
    machine.hide(target)


def test_a_proven_object_that_was_changed_is_fetched_again_and_never_served(
    maker: Any, make_far_machine: MachineMaker, far: Origin, source: Path, tmp_path: Path
) -> None:
    known(maker)
    maker.publish(far, find_image(maker.store(), "image"))
    machine, target = make_far_machine(), tmp_path / "mnt"
    mounted = machine.show(target)
    machine.fill(mounted)
    machine.hide(target)
    machine.show(target, prefer_lazy=True)
    (second,) = offered(machine)
    machine.hide(target)
    path = machine.store().local.path(parse_name(second.name))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(12_345_678)
        file.write(b"\0\1\2\3")
    machine.show(target, prefer_lazy=True)
    assert not second.exists()
    assert (target / "large").read_bytes() == (source / "large").read_bytes()
    machine.hide(target)
