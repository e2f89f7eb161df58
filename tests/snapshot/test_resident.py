import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.snapshot.resident import Part, resident_parts
from nagara.testing.objects import noise

PART = 1 << 20  # far more than the kernel maps around a fault
PROGRAM = """
import mmap, sys
file = open(sys.argv[1], "r+b")
shared = mmap.mmap(file.fileno(), 4 << 20, prot=mmap.PROT_READ)
shared[(1 << 20) + 5]
own = mmap.mmap(file.fileno(), 1 << 20, access=mmap.ACCESS_COPY, offset=3 << 20)
own[:] = bytes(1 << 20)
other = open(sys.argv[2], "rb")
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def begin() -> Iterator[Callable[..., int]]:
    """Starts the program with two files; gives its pid once they are mapped and open."""
    begun = []

    def start(*files: Path) -> int:
        command = [sys.executable, "-c", PROGRAM, *map(str, files)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        begun.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        return child.pid

    yield start
    for child in begun:
        child.communicate()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "large").write_bytes(noise(4 << 20))
    return tmp_path / "large"


def test_what_was_read_and_what_was_written_over_counts(
    begin: Callable[..., int], large: Path, tmp_path: Path
) -> None:
    (tmp_path / "open").write_bytes(b"not read")
    pid = begin(large, tmp_path / "open")
    found = resident_parts([pid], PART)
    mine = [part for part in found if part.path.startswith(str(tmp_path))]
    # The first part of each is what a restore looks at, whatever has been read of it.
    assert sorted(mine) == sorted(
        [*(Part(str(large), number) for number in (0, 1, 3)), Part(str(tmp_path / "open"), 0)]
    )
    assert len(found) == len(set(found))
    assert any("/libc" in part.path or "/ld-" in part.path for part in found)


def test_a_mapping_that_begins_in_the_middle_is_counted_from_the_files_beginning(
    large: Path,
) -> None:
    with large.open("rb") as file:
        length = 3 << 19
        mapped = mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, offset=2 << 20)
        mapped[length - 1]
        found = resident_parts([os.getpid()], PART)
        mapped.close()
    assert [part.number for part in found if part.path == str(large)] == [0, 3]


def test_a_process_that_has_ended_has_nothing(begin: Callable[..., int], large: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    pid = begin(large, large)
    assert resident_parts([child.pid], PART) == []
    assert resident_parts([child.pid, pid], PART) == resident_parts([pid], PART)
