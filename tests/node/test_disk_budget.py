"""One bound over all that a node keeps: what goes first, and what never."""

import os
from pathlib import Path
from typing import Any

import pytest

from nagara.contract.replica import ImageOrder, StartKind
from nagara.node.disk_budget import DiskBudget, Old, order


def test_logs_go_before_snapshots_and_these_before_images_the_oldest_first() -> None:
    found = [
        Old(kind, name, at_s, lambda: 0)
        for kind, name, at_s in (
            ("image", "i", 1.0), ("snapshot", "new", 9.0), ("log", "late", 8.0),
            ("snapshot", "old", 2.0), ("log", "early", 7.0),
        )
    ]  # fmt: skip
    assert [old.name for old in order(found)] == ["early", "late", "old", "new", "i"]


def budget(yard: Any, limit_bytes: int | None) -> DiskBudget:
    """Another one over the open node's things, without a grace time."""
    node = yard.node
    catalog = node._snapshots.catalog if node._snapshots else None
    return DiskBudget(yard.state, node._images, node._logs, catalog, limit_bytes, grace_s=-1000.0)


def write_logs(yard: Any, *names: str) -> list[Path]:
    folder = yard.state / "node/logs/default/other"
    folder.mkdir(parents=True)
    logs = []
    for age, name in enumerate(reversed(names)):
        log = folder / f"{name}.log"
        log.write_bytes(b"x" * (1 << 20))
        os.utime(log, (1e9 - age, 1e9 - age))
        logs.insert(0, log)
    return logs


@pytest.mark.root
async def test_logs_of_replicas_that_run_stay_and_no_more_goes_than_has_to(yard) -> None:
    report = await yard.start()
    first, second, third = write_logs(yard, "first", "second", "third")
    kept_bytes = sum(dict(budget(yard, None).report().parts).values())
    tidy = budget(yard, kept_bytes - (1 << 20) - 1000)
    tidy.look({report.replica, "second"})
    assert [log.exists() for log in (first, second, third)] == [False, True, False]
    assert dict(tidy.report().removed)["log"] >= 2 << 20
    assert b"serving" in await yard.node.logs(report.replica)
    tidy = budget(yard, None)
    tidy.look(set())
    assert second.exists()  # nothing is bounded


@pytest.mark.root
async def test_snapshots_of_earlier_versions_go_and_the_newest_restores(yard, caplog) -> None:
    old, new = yard.spec(definition="d1"), yard.spec(definition="d2")
    for spec in (old, new):
        assert (await yard.capture(spec)).reason is None
    assert len(yard.roots("obedient")) == 2
    tidy = budget(yard, 1)
    tidy.look(set())
    tidy.look(set())
    assert len(yard.roots("obedient")) == 1
    assert caplog.text.count("all of it is in use") == 1
    assert dict(tidy.report().removed)["snapshot"] > 1 << 20
    assert (await yard.start(old)).kind is StartKind.PLAIN
    assert (await yard.start(new)).kind is StartKind.RESTORED


@pytest.mark.root
async def test_images_of_earlier_versions_go_and_the_newest_stays(yard, tmp_path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for content in (b"one", b"two"):
        (tree / "file").write_bytes(content * 100_000)
        await yard.node.bring_image(ImageOrder("default", "app", f"dir:{tree}"))
    images = yard.state / "store/tenants/default/roots/images"
    names = sorted(images.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(names) == 2
    for age, path in enumerate(reversed(names)):
        os.utime(path, (1e9 - age, 1e9 - age))
    tidy = budget(yard, 1)
    tidy.look(set())
    assert list(images.iterdir()) == [names[1]]
    assert dict(tidy.report().removed)["image"] >= 300_000
