import itertools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.base.linux import MNT_DETACH, MS_NODEV, mount, unmount
from nagara.image.lazy_layer import SERVED_MARK
from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin
from nagara.testing.trees import listing

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]
GONE = r"not connected|connection abort|Input/output error"


def test_a_killed_daemon_is_replaced_and_old_handles_and_mappings_go_on(
    shown: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    target = tmp_path / "mnt"
    shown.mounts.lazy_layer("default").supervise()
    content = noise((64 << 20) + 4321, 1)
    with (target / "large").open("rb", buffering=0) as handle:
        mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        assert handle.read(100) == content[:100]
        far.behave(Behaviour(latency_s=0.3))
        script = "import sys; sys.stdout.buffer.write(open(sys.argv[1],'rb').read())"
        blocked = subprocess.Popen(
            [sys.executable, "-c", script, str(target / "medium")], stdout=subprocess.PIPE
        )
        time.sleep(0.2)
        first = shown.daemon_pid()
        os.kill(first, signal.SIGKILL)
        assert blocked.communicate(timeout=60)[0] == noise(300_000)
        far.behave(Behaviour())
        assert os.pread(handle.fileno(), 1000, 50 << 20) == content[50 << 20 : (50 << 20) + 1000]
        assert mapping[40 << 20 : (40 << 20) + 100] == content[40 << 20 : (40 << 20) + 100]
        assert shown.daemon_pid() != first
        mapping.close()
    assert listing(target) == listing(source)


def test_a_reader_killed_while_the_origin_stalls_dies_at_once(
    shown: Any, source: Path, tmp_path: Path, far: Origin
) -> None:
    target = tmp_path / "mnt"
    for file in ("medium", "large"):
        far.behave(Behaviour(stall_after=0))
        far.counters(reset=True)
        script = "import sys; open(sys.argv[1],'rb').read()"
        reader = subprocess.Popen([sys.executable, "-c", script, str(target / file)])
        while not far.counters()["requests"]:
            time.sleep(0.02)
        time.sleep(0.1)
        reader.kill()
        assert reader.wait(timeout=2) == -signal.SIGKILL
        far.behave(Behaviour())
    assert (target / "medium").read_bytes() == noise(300_000)


@pytest.mark.parametrize(
    "fault", [Behaviour(lie=True), Behaviour(status=503), Behaviour(truncate_after=10)]
)
def test_what_cannot_be_had_is_an_error_and_never_wrong_bytes(
    shown: Any, tmp_path: Path, far: Origin, fault: Behaviour
) -> None:
    target = tmp_path / "mnt"
    far.behave(fault)
    with pytest.raises(OSError, match="Input/output error"):
        (target / "medium").read_bytes()
    far.behave(Behaviour())
    assert (target / "medium").read_bytes() == noise(300_000)


MISBEHAVING = (
    Behaviour(latency_s=0.05),
    Behaviour(share=0.5, truncate_after=1000),
    Behaviour(share=0.5, lie=True),
    Behaviour(share=0.5, status=503),
    Behaviour(share=0.5, status=429, retry_after="0"),
    Behaviour(share=0.2, stall_after=10, stall_s=0.5, times=2),
)


@pytest.mark.parametrize("method", ["overlay", "local", "tree", "checkout"])
def test_readers_from_many_processes_see_the_source_while_the_origin_misbehaves(
    maker: Any,
    make_far_machine: MachineMaker,
    source: Path,
    tmp_path: Path,
    far: Origin,
    method: str,
) -> None:
    target = tmp_path / "mnt"
    machine = make_far_machine(method="overlay" if method == "local" else method)
    mounted = machine.show(target)
    if method == "local":
        machine.fill(mounted)
        machine.hide(target)
        assert not machine.show(target).is_lazy
    script = Path(__file__).parent / "random_reader.py"
    readers = [
        subprocess.Popen([sys.executable, str(script), str(source), str(target), str(seed)])
        for seed in range(16)
    ]
    try:
        moods = itertools.cycle(MISBEHAVING)
        while any(reader.poll() is None for reader in readers):
            far.behave(next(moods))
            time.sleep(0.2)
        assert [reader.returncode for reader in readers] == [0] * 16
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def test_what_was_read_stays_and_the_rest_is_an_error_when_the_origin_dies(
    shown: Any, tmp_path: Path, far: Origin
) -> None:
    target = tmp_path / "mnt"
    assert (target / "medium").read_bytes() == noise(300_000)
    far.kill()
    assert (target / "medium").read_bytes() == noise(300_000)
    assert (target / "small").read_bytes() == b"inline"
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            (target / "large").read_bytes()


def test_without_a_daemon_and_a_keeper_there_is_an_error_and_never_a_wrong_byte(
    shown: Any, tmp_path: Path
) -> None:
    target, lazy = tmp_path / "mnt", shown.mounts.lazy_layer("default")
    assert (target / "medium").read_bytes() == noise(300_000)
    script = (
        "import mmap, sys\nf = open(sys.argv[1], 'rb')\n"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\nprint('mapped', flush=True)\n"
        "sys.stdin.read()\nprint(m[50 << 20])"
    )
    mapper = subprocess.Popen(
        [sys.executable, "-c", script, str(target / "large")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert mapper.stdout is not None
    assert mapper.stdout.readline() == "mapped\n"
    for name in (f"fuse:{lazy.path}", f"fuse:{lazy.path}{SERVED_MARK}"):
        shown.keeper.release(name)
    os.kill(shown.daemon_pid(), signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(OSError, match=GONE):
            (target / "large").read_bytes()
    out, _ = mapper.communicate(timeout=20)
    assert (mapper.returncode, out) == (-signal.SIGBUS, "")
    shown.hide(target)
    shown.show(target)
    assert (target / "large").read_bytes() == noise((64 << 20) + 4321, 1)


def test_a_kernel_that_cannot_hand_over_a_mount_gets_a_new_one(
    maker: Any, make_far_machine: MachineMaker, tmp_path: Path
) -> None:
    machine, target = make_far_machine(), tmp_path / "mnt"
    # A notification that no kernel knows is refused like one that an old kernel does not know.
    unknown = "import nagara.image.fuse_wire as wire; wire._NOTIFY_RESEND = 99"
    machine.daemon_program = ("-c", f"{unknown}; from nagara.cli.files_daemon import *; main()")
    machine.show(target)
    assert (target / "medium").read_bytes() == noise(300_000)
    os.kill(machine.daemon_pid(), signal.SIGKILL)
    machine.mounts.lazy_layer("default").ensure()
    with pytest.raises(OSError, match=GONE):
        (target / "large").read_bytes()
    machine.hide(target)
    machine.show(target)
    assert (target / "large").read_bytes() == noise((64 << 20) + 4321, 1)


def test_what_finds_no_room_on_the_disk_is_read_all_the_same(
    maker: Any, make_far_machine: MachineMaker, source: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "other"
    disk.mkdir()
    mount("test", disk, "tmpfs", MS_NODEV, "size=8m")
    try:
        machine, target = make_far_machine(), tmp_path / "mnt"
        machine.show(target)
        assert listing(target) == listing(source)
        assert listing(target) == listing(source)
        machine.hide(target)
        machine.mounts.lazy_layer("default").unmount()
    finally:
        unmount(disk, MNT_DETACH)
