"""Large objects that were proven are read past the daemon of a lazy mount."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nagara.image import mounting
from nagara.image.images import find_image, remove_image
from nagara.image.trace import read_trace
from nagara.image.tracing import STARTS_RECORDED
from nagara.store.collecting import collect_local
from nagara.store.errors import FullError
from nagara.store.names import name_bytes, parse_name
from nagara.store.roots import write_root
from nagara.testing.objects import noise
from nagara.testing.origin import Origin
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]


@pytest.fixture
def many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are too many objects for a mount to look at all of them."""
    monkeypatch.setattr(mounting, "_FEW_OBJECTS", 1)


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


@pytest.mark.usefixtures("many_objects")
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


@pytest.mark.usefixtures("many_objects")
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


def test_what_comes_ahead_of_need_on_a_new_machine_is_read_past_the_daemon(
    maker: Any, make_far_machine: MachineMaker, far: Origin, source: Path, tmp_path: Path
) -> None:
    machine, target = make_far_machine("first"), tmp_path / "mnt"
    mounted = machine.show(target)
    for name in ("medium", "folder/in it"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    image = machine.mounts.finish_recording(mounted)
    machine.publish(far, image)
    machine.hide(target)
    machine, target = make_far_machine("second"), tmp_path / "mnt/second"
    mounted = machine.show(target)
    while machine.mounts.progress(mounted).is_running:
        time.sleep(0.01)
    before = machine.mounts.tier_reports("default")[0].hits
    assert (target / "medium").read_bytes() == (source / "medium").read_bytes()
    assert machine.mounts.tier_reports("default")[0].hits == before
    assert listing(target) == listing(source)
    traced = read_trace(machine.store().read(image.trace))
    again = machine.mounts.finish_recording(mounted)
    more = read_trace(machine.store().read(again.trace))
    assert again.starts == image.starts + 1
    assert more.objects[: len(traced.objects)] == traced.objects
    assert len(more.objects) > len(traced.objects)  # what nobody had fetched ahead
    machine.hide(target)


@pytest.mark.parametrize("name", ["medium", "large"])
def test_an_object_that_was_changed_between_two_mounts_is_never_served(
    maker: Any, make_far_machine: MachineMaker, far: Origin, source: Path, tmp_path: Path, name: str
) -> None:
    known(maker)
    maker.publish(far, find_image(maker.store(), "image"))
    machine, target = make_far_machine(), tmp_path / "mnt"
    assert machine.show(target).passing == (machine.store().local.objects,)
    assert (target / name).read_bytes() == (source / name).read_bytes()
    machine.hide(target)
    path = machine.store().local.path(name_bytes((source / name).read_bytes()))
    if not path.exists():  # its chunks are all here, but nobody has needed it as one file
        machine.store().ensure(parse_name(path.name))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(123_456)
        file.write(b"\0\1\2\3")
    assert machine.show(target, prefer_lazy=True).passing != (machine.store().local.objects,)
    assert (target / name).read_bytes() == (source / name).read_bytes()
    machine.hide(target)


@pytest.mark.parametrize("few", [1, 2048])
def test_eviction_and_collection_take_nothing_that_is_read_past_the_daemon(
    make_machine: MachineMaker,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few: int,
) -> None:
    monkeypatch.setattr(mounting, "_FEW_OBJECTS", few)
    machine, target = make_machine(settings='{"limit": "90MB"}'), tmp_path / "mnt"
    machine.add(source)
    known(machine)
    local = machine.store().local
    mounted = machine.show(target, prefer_lazy=True)
    assert mounted.passing == (local.objects if few > 1 else local.proven.folder,)
    remove_image(local, "image")
    with contextlib.suppress(FullError):
        for seed in range(40):
            machine.store().put_bytes(noise(1_000_000, 1000 + seed))
    collect_local(local, grace_s=-1)
    assert listing(target) == listing(source)
    machine.hide(target)
    assert collect_local(local, grace_s=-1).kept == 0
    assert offered(machine) == list(local.objects.iterdir()) == []
    assert machine.objects.ledger.total_bytes() == 0
