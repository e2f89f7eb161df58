import errno
from pathlib import Path

import pytest

from nagara.base.errors import NagaraError
from nagara.image.mounts import mount_points
from nagara.node.capabilities import CAPABILITIES, CONTAINERS, SNAPSHOTS
from nagara.node.doctor import Status, _probes, examine, judged
from nagara.sandbox.tools import Tools

NAMES = [capability.name for capability in CAPABILITIES]


def all_work() -> dict:
    return {name: lambda: "it does" for name in NAMES}


def refused() -> str:
    raise OSError(errno.EPERM, "Operation not permitted", "/dev/fuse")


def explained() -> str:
    raise NagaraError("3.17 is too old", where="/usr/sbin/criu")


def statuses(examination) -> dict:
    return {finding.capability.name: finding.status for finding in examination.findings}


def test_each_capability_has_a_probe_and_only_needs_earlier_ones(tmp_path: Path) -> None:
    assert list(_probes(tmp_path, Tools(None, None, None, None, ()))) != []
    assert set(_probes(tmp_path, Tools(None, None, None, None, ()))) == set(NAMES)
    for at, capability in enumerate(CAPABILITIES):
        assert set(capability.needs) <= set(NAMES[:at])
    assert {*CONTAINERS, *SNAPSHOTS} <= set(NAMES)


def test_where_everything_works_replicas_are_containers_that_can_be_saved() -> None:
    examination = judged(all_work())
    assert set(statuses(examination).values()) == {Status.WORKS}
    assert examination.has_containers
    assert examination.has_snapshots


def test_what_is_refused_is_lacking_with_its_reason_and_what_needs_it_is_not_tried() -> None:
    examination = judged(all_work() | {"fuse": refused})
    found = {finding.capability.name: finding for finding in examination.findings}
    assert (found["fuse"].status, found["fuse"].detail) == (
        Status.LACKING,
        "/dev/fuse: Operation not permitted",
    )
    assert (found["fuse_passthrough"].status, found["fuse_passthrough"].detail) == (
        Status.UNTRIED,
        "needs fuse",
    )
    assert examination.has_snapshots


@pytest.mark.parametrize("lacking", SNAPSHOTS)
def test_without_one_of_its_needs_there_are_no_snapshots(lacking: str) -> None:
    examination = judged(all_work() | {lacking: explained})
    found = {finding.capability.name: finding for finding in examination.findings}
    assert found[lacking].detail == "/usr/sbin/criu: 3.17 is too old"
    assert examination.has_containers
    assert not examination.has_snapshots


@pytest.mark.parametrize("lacking", CONTAINERS)
def test_without_one_of_their_needs_there_are_no_containers(lacking: str) -> None:
    examination = judged(all_work() | {lacking: explained})
    assert not examination.has_containers
    assert not examination.has_snapshots


@pytest.mark.root
def test_this_machine_is_examined_and_nothing_is_left(
    tools: Tools, state_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "tools").symlink_to((state_dir / "tools").resolve())
    examination = examine(tmp_path)
    assert statuses(examination)["checkpoint"] is Status.WORKS, examination
    assert examination.has_snapshots
    assert mount_points(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]
