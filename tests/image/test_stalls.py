"""An origin that stalls holds up who wants its bytes, and nobody else."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nagara.testing.objects import noise
from nagara.testing.origin import Behaviour, Origin

pytestmark = pytest.mark.root
MachineMaker = Callable[..., Any]
_STALLED = 100
# Prints a line for each read that ends, however.
_READERS = """
import sys, threading
def read(path):
    try:
        open(path, "rb").read()
    except OSError as error:
        print(error, flush=True)
    else:
        print("read", flush=True)
for path in sys.argv[1:]:
    threading.Thread(target=read, args=(path,)).start()
print("asking", flush=True)
"""


def test_a_hundred_stalled_readers_do_not_hold_up_another_object(
    make_machine: MachineMaker, make_far_machine: MachineMaker, tmp_path: Path, far: Origin
) -> None:
    source, target = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    for number in range(_STALLED):
        (source / f"stalled-{number}").write_bytes(noise(8000, number))
    for name in ("fast", "later"):
        (source / name).write_bytes(noise(3000, len(name)))
    maker = make_machine("maker")
    maker.publish(far, maker.add(source).image)
    make_far_machine().show(target)
    far.counters(reset=True)
    far.behave(Behaviour(stall_after=0, from_bytes=4000))
    paths = [str(target / f"stalled-{number}") for number in range(_STALLED)]
    readers = subprocess.Popen([sys.executable, "-c", _READERS, *paths], stdout=subprocess.PIPE)
    assert readers.stdout is not None
    try:
        assert readers.stdout.readline() == b"asking\n"
        while len(far.counters()["requests"]) < 96:
            time.sleep(0.05)
        # No thread of this process may wait for the mount: it would hold the readers' pipe.
        fast = subprocess.run(["cat", str(target / "fast")], capture_output=True, timeout=60)
    finally:
        readers.kill()
        said, _ = readers.communicate()
    assert fast.stdout == noise(3000, 4)
    assert said == b""  # they still waited when it had been read
    # What was asked for by those who are gone goes on, and holds up nobody either.
    later = subprocess.run(["cat", str(target / "later")], capture_output=True, timeout=60)
    assert later.stdout == noise(3000, 5)
    far.behave(Behaviour())
    stalled = subprocess.run(["cat", paths[0]], capture_output=True, timeout=60)
    assert stalled.stdout == noise(8000, 0)
