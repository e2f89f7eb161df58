"""The connection behind a lazy layer, when nobody serves it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.base.linux import MS_RDONLY, mount
from nagara.image import fuse_wire as wire
from nagara.image.lazy_layer import (
    READ_AHEAD_KIB,
    abort_connection,
    connection_number,
    set_read_ahead,
)
from nagara.image.mounts import device_of, unmount_tree

_READER = "import os, sys; os.stat(sys.argv[1])"


@pytest.fixture
def many_devices(tmp_path: Path) -> Iterator[None]:
    """Whatever is mounted now has a device number beyond the first 256."""
    folders = [tmp_path / f"many/{number}" for number in range(257)]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            mount("nagara-test", folder, "tmpfs", 0, "size=4k")
        yield
    finally:
        unmount_tree(tmp_path / "many")


def test_a_connection_has_the_number_that_the_kernel_prints() -> None:
    assert connection_number((0, 39)) == 39
    assert connection_number((0, 300)) == 300
    assert connection_number((1, 2)) == (1 << 20) + 2


def mounted(mounts: Path, name: str) -> tuple[Path, int, tuple[int, int]]:
    """A FUSE mount with a number beyond 255. Others unmount meanwhile, and lower ones come free:
    those are taken and kept."""
    for number in range(200):
        target = mounts / f"{name}{number}"
        target.mkdir()
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
        mount("nagara-test", target, "fuse", MS_RDONLY, options)
        device = device_of(target)
        assert device is not None
        if device[1] > 255:
            return target, descriptor, device
        os.close(descriptor)
    raise AssertionError("no number beyond 255")


@pytest.mark.root
@pytest.mark.usefixtures("many_devices")
@pytest.mark.parametrize("name", ["plain", "a b\\c\td"])
def test_who_waits_for_a_mount_that_is_aborted_gets_an_error(mounts: Path, name: str) -> None:
    target, descriptor, device = mounted(mounts, name)
    set_read_ahead(target, READ_AHEAD_KIB)
    entry = Path(f"/sys/class/bdi/{device[0]}:{device[1]}/read_ahead_kb")
    assert entry.read_text().strip() == str(READ_AHEAD_KIB)
    command = [sys.executable, "-c", _READER, str(target / "file")]
    reader = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        hello = wire.parse_request(os.read(descriptor, wire.REQUEST_BYTES))
        os.write(descriptor, wire.init_answer(hello))
        asked = wire.parse_request(os.read(descriptor, wire.REQUEST_BYTES))
        assert asked.operation == wire.LOOKUP
        abort_connection(target)
        _, said = reader.communicate(timeout=20)
    finally:
        os.close(descriptor)  # whatever happened: it ends the wait
        reader.wait(20)
    assert b"ConnectionAbortedError" in said
