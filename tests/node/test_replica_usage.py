"""What replicas use, read from real control groups, and the end of one that writes too much."""

import asyncio
import os
from pathlib import Path

import pytest

from nagara.contract.node import StartFailedError
from nagara.contract.replica import Limits, StartKind
from nagara.node import replica_usage
from nagara.node.replica_usage import device_use, layer_bytes

WRITE = """
with open("/srv/filling", "wb") as file:
    file.write(b"x" * {mib} * 2**20); file.flush(); os.fsync(file.fileno())
"""


def test_a_layer_counts_each_file_once_and_no_holes(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/file").write_bytes(b"x" * (1 << 20))
    before = layer_bytes(tmp_path)
    assert before >= 1 << 20
    os.link(tmp_path / "inner/file", tmp_path / "again")
    with (tmp_path / "holes").open("wb") as holes:
        holes.truncate(1 << 30)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert layer_bytes(tmp_path) < before + (64 << 10)
    assert layer_bytes(tmp_path / "nowhere") == 0


def test_devices_are_known_by_number_and_by_name(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 93'; echo '1, GPU-bb, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device_use() == {"nvidia.com/gpu=0": 0.93, "nvidia.com/gpu=GPU-aa": 0.93}
    monkeypatch.setattr(replica_usage, "_QUERY", (str(tmp_path / "nowhere"),))
    assert device_use() == {}


@pytest.mark.root
async def test_limits_of_cpu_and_memory_are_what_use_is_compared_with(yard) -> None:
    limits = Limits(cpu=1.5, memory_bytes=256 << 20, disk_bytes=1 << 30)
    report = await yard.start(yard.spec(limits=limits))
    await yard.tell(report.replica, "held = bytearray(64 << 20)")
    (usage,) = await yard.node.usage()
    assert (usage.replica, usage.cores) == (report.replica, 1.5)
    assert usage.memory_limit_bytes == 256 << 20
    assert 64 << 20 < usage.memory_bytes < 256 << 20
    assert usage.disk_limit_bytes == 1 << 30
    assert usage.device is None


@pytest.mark.root
async def test_a_replica_that_outgrows_its_disk_is_ended_with_the_reason(yard) -> None:
    spec = yard.spec(limits=Limits(disk_bytes=8 << 20))
    assert (await yard.capture(spec)).reason is None
    heard = asyncio.create_task(anext(aiter(yard.node.exits())))
    for kind in (StartKind.RESTORED, StartKind.PLAIN):
        report = await yard.start(spec if kind is StartKind.RESTORED else yard.spec(
            limits=Limits(disk_bytes=8 << 20), snapshot=False
        ))  # fmt: skip
        assert report.kind is kind
        await yard.tell(report.replica, WRITE.format(mib=4))
        await yard.ask(report.replica)
        await yard.tell(report.replica, WRITE.format(mib=16))
        async with asyncio.timeout(60):
            status = await heard
        assert status.replica == report.replica
        assert "to its own layer, and limits.disk is" in status.detail["reason"]
        await yard.stop(report.replica)
        heard = asyncio.create_task(anext(aiter(yard.node.exits())))
    heard.cancel()


@pytest.mark.root
async def test_one_that_fills_its_disk_before_it_is_ready_says_so(yard) -> None:
    fill = WRITE.format(mib=16).replace("os.", "__import__('os').") + "import time; time.sleep(50)"
    spec = yard.spec(limits=Limits(disk_bytes=8 << 20), env={"FIRST": fill})
    with pytest.raises(StartFailedError, match=r"limits\.disk is .* before it was ready"):
        await yard.start(spec)
