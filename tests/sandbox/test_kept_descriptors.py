import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nagara.sandbox.keeper_client import KeeperClient, KeeperError
from nagara.sandbox.kept_descriptors import KeptDescriptors
from nagara.sandbox.unix_socket import connect


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "keeper.sock"
    subprocess.run([sys.executable, "-m", "nagara.sandbox.keeper", str(path)], check=True)
    for _ in range(500):
        if path.exists():
            break
        time.sleep(0.01)
    yield path
    for name in ("a", *(f"n{number}" for number in range(200))):
        KeptDescriptors(path).release(name)
    asyncio.run(KeeperClient(path).shutdown())  # it is nobody's child


def test_a_descriptor_outlives_the_process_that_gave_it(keeper: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from nagara.sandbox.kept_descriptors import KeptDescriptors\n"
        "file = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)\nos.write(file, b'kept')\n"
        "KeptDescriptors(Path(sys.argv[1])).hold('a', file)\nos.unlink(sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(keeper), str(tmp_path / "f")], check=True)
    kept = KeptDescriptors(keeper)
    for _ in range(3):
        descriptor = kept.held("a")
        assert descriptor is not None
        assert os.pread(descriptor, 10, 0) == b"kept"
        os.close(descriptor)


def test_holding_again_replaces_and_releasing_closes(keeper: Path) -> None:
    kept = KeptDescriptors(keeper)
    reading, writing = os.pipe()
    other, other_writing = os.pipe()
    kept.hold("pipe", writing)
    os.close(writing)
    kept.hold("pipe", other_writing)  # the first one is closed by that
    assert os.read(reading, 1) == b""
    kept.release("pipe")
    kept.release("pipe")
    os.close(other_writing)
    assert os.read(other, 1) == b""
    assert kept.held("pipe") is None
    for each in (reading, other):
        os.close(each)


def test_a_request_without_its_descriptor_is_refused(keeper: Path) -> None:
    with connect(keeper, timeout_s=10) as client:
        client.sendall(b'{"op": "hold", "name": "x"}\n')
        assert b"no descriptor came" in client.recv(1000)
    assert KeptDescriptors(keeper).held("x") is None


def test_many_at_once_are_not_mixed_up(keeper: Path, tmp_path: Path) -> None:
    kept = KeptDescriptors(keeper)
    for number in range(50):
        path = tmp_path / str(number)
        path.write_text(str(number))
        descriptor = os.open(path, os.O_RDONLY)
        kept.hold(f"n{number}", descriptor)
        os.close(descriptor)
    for number in range(50):
        held = kept.held(f"n{number}")
        assert held is not None
        assert os.pread(held, 10, 0) == str(number).encode()
        os.close(held)


def test_without_a_keeper_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeeperError, match="cannot be reached"):
        KeptDescriptors(tmp_path / "none.sock").held("x")
