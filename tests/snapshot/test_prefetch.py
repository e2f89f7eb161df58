"""Reading ahead: what was asked for is in the page cache afterwards, on any device."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.snapshot.prefetch import prefetch

FILE_BYTES = 24 << 20


def test_it_counts_what_it_asked_for_and_passes_over_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 20_000_000)
    assert prefetch([tmp_path / "a", tmp_path / "none"]) == 20_000_000


@pytest.fixture
def slow_device(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk that reads ahead no more than most do, and nothing of it cached."""
    image, folder = tmp_path / "disk", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(2 * FILE_BYTES)
    run("mkfs.ext4", "-q", str(image))
    device = run("losetup", "--find", "--show", str(image))
    queue = Path("/sys/block", Path(device).name, "queue")
    folder.mkdir()
    settings = [queue / "read_ahead_kb", queue / "max_sectors_kb"]
    before = [setting.read_text() for setting in settings]
    try:
        for setting in settings:
            setting.write_text("128")
        run("mount", device, str(folder))
        try:
            (folder / "file").write_bytes(b"x" * FILE_BYTES)
            run("umount", str(folder))
            run("mount", device, str(folder))
            yield folder / "file"
        finally:
            run("umount", str(folder))
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.write_text(value)
        run("losetup", "--detach", device)


@pytest.mark.root
def test_all_of_a_file_is_read_where_the_disk_reads_little_at_once(slow_device: Path) -> None:
    assert cached_bytes(slow_device) < FILE_BYTES
    prefetch([slow_device])
    assert cached_bytes(slow_device) == FILE_BYTES


def cached_bytes(file: Path) -> int:
    return int(run("fincore", "--bytes", "--noheadings", "--output", "RES", str(file)))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
