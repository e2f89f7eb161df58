"""Saved processes without their zero pages: synthetic images, and real ones put back."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nagara.sandbox.tools import Tools
from nagara.snapshot.criu_images import (
    Field,
    ImageFile,
    ImageFormatError,
    encode_message,
    number_of,
    parse_message,
)
from nagara.snapshot.zero_pages import Anonymous, Run, drop_zero_pages, runs

PAGE = os.sysconf("SC_PAGE_SIZE")
HEAD = struct.pack("<II", 0x54564319, 1)
FILE_PRIVATE, ANONYMOUS_PRIVATE, ANONYMOUS_SHARED = 1 << 6, 1 << 9, 1 << 8
IN_PARENT, PRESENT = 1, 4
BASE = 0x7F0000000000


def message(*numbers: tuple[int, int]) -> bytes:
    return encode_message([Field(number, 0, value) for number, value in numbers])


def write_images(
    folder: Path,
    mappings: list[tuple[int, list[bytes | None]]],
    *,
    name: str = "1",
) -> None:
    """Writes a process's images.

    Args:
        mappings: status of each mapping and its pages; None for one that was not saved.
    """
    vmas, entries, pages = [], [], []
    address = BASE
    for status, contents in mappings:
        end = address + len(contents) * PAGE
        vma = message((1, address), (2, end), (7, status | 1))
        vmas.append(Field(14, 2, vma))
        for content in contents:
            if content is not None:
                entries.append(message((1, address), (2, 0), (4, PRESENT), (5, 1)))
                pages.append(content)
            address += PAGE
    mm = ImageFile(HEAD, (encode_message(vmas),))
    (folder / f"mm-{name}.img").write_bytes(mm.content())
    pagemap = ImageFile(HEAD, (message((1, int(name))), *entries))
    (folder / f"pagemap-{name}.img").write_bytes(pagemap.content())
    (folder / f"pages-{name}.img").write_bytes(b"".join(pages))


def memory_of(folder: Path, name: str = "1") -> dict[int, bytes]:
    """Address → page, of what the images carry."""
    image = ImageFile.parse((folder / f"pagemap-{name}.img").read_bytes())
    content = (folder / f"pages-{name}.img").read_bytes()
    found, at = {}, 0
    for entry in map(parse_message, image.messages[1:]):
        address, count = number_of(entry, 1), number_of(entry, 5)
        assert address is not None
        assert count is not None
        assert count > 0
        for page in range(count):
            found[address + page * PAGE] = content[at : at + PAGE]
            at += PAGE
    assert at == len(content)
    return found


page = st.sampled_from([bytes(PAGE), bytes(PAGE - 1) + b"x", b"y" * PAGE, None])
status = st.sampled_from([FILE_PRIVATE, ANONYMOUS_PRIVATE, ANONYMOUS_SHARED])


@settings(max_examples=60)
@given(st.lists(st.tuples(status, st.lists(page, min_size=1, max_size=9)), min_size=1, max_size=6))
def test_only_zero_pages_of_private_anonymous_memory_are_left_out(
    tmp_path_factory: pytest.TempPathFactory, mappings: list[tuple[int, list[bytes | None]]]
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    write_images(folder, mappings)
    before = memory_of(folder)
    kind = {}
    address = BASE
    for status_of, contents in mappings:
        for _ in contents:
            kind[address] = status_of
            address += PAGE
    expected = {
        address: content
        for address, content in before.items()
        if any(content) or kind[address] != ANONYMOUS_PRIVATE
    }
    saved_bytes = drop_zero_pages(folder)
    left_out = (len(before) - len(expected)) * PAGE
    if left_out * 20 >= len(before) * PAGE and left_out:
        assert memory_of(folder) == expected
        assert saved_bytes == left_out
    else:
        assert memory_of(folder) == before
        assert saved_bytes == 0


def test_long_entries_are_read_block_by_block_and_stay_joined(tmp_path: Path) -> None:
    count = 600
    vma = message((1, BASE), (2, BASE + count * PAGE), (7, ANONYMOUS_PRIVATE))
    mm = ImageFile(HEAD, (encode_message([Field(14, 2, vma)]),))
    (tmp_path / "mm-7.img").write_bytes(mm.content())
    entry = message((1, BASE), (4, PRESENT), (5, count))
    (tmp_path / "pagemap-7.img").write_bytes(ImageFile(HEAD, (message((1, 3)), entry)).content())
    content = b"a" * PAGE * 500 + bytes(PAGE * 60) + b"b" * PAGE * 40
    (tmp_path / "pages-3.img").write_bytes(content)
    assert drop_zero_pages(tmp_path) == 60 * PAGE
    image = ImageFile.parse((tmp_path / "pagemap-7.img").read_bytes())
    assert image.messages[1:] == (
        message((1, BASE), (4, PRESENT), (5, 500)),
        message((1, BASE + 560 * PAGE), (4, PRESENT), (5, 40)),
    )


def test_pages_kept_in_an_earlier_dump_take_no_room_and_stay_named(tmp_path: Path) -> None:
    write_images(tmp_path, [(ANONYMOUS_PRIVATE, [bytes(PAGE), b"x" * PAGE])])
    image = ImageFile.parse((tmp_path / "pagemap-1.img").read_bytes())
    elsewhere = message((1, BASE + 9 * PAGE), (4, IN_PARENT), (5, 2))
    longer = ImageFile(HEAD, (*image.messages, elsewhere))
    (tmp_path / "pagemap-1.img").write_bytes(longer.content())
    assert drop_zero_pages(tmp_path) == PAGE
    kept = ImageFile.parse((tmp_path / "pagemap-1.img").read_bytes()).messages
    assert kept[1:] == (message((1, BASE + PAGE), (2, 0), (4, PRESENT), (5, 1)), elsewhere)


def test_few_zero_pages_are_not_worth_writing_the_rest_anew(tmp_path: Path) -> None:
    write_images(tmp_path, [(ANONYMOUS_PRIVATE, [bytes(PAGE), *[b"x" * PAGE] * 99])])
    inode = (tmp_path / "pages-1.img").stat().st_ino
    assert drop_zero_pages(tmp_path) == 0
    assert (tmp_path / "pages-1.img").stat().st_ino == inode


@pytest.mark.parametrize(
    "entry",
    [
        message((1, BASE), (4, PRESENT)),
        message((1, BASE), (5, 2)),
        message((1, BASE), (4, PRESENT), (5, 3)),
    ],
    ids=["no count", "no flags", "another size"],
)
def test_images_of_another_form_are_refused_and_left_alone(tmp_path: Path, entry: bytes) -> None:
    write_images(tmp_path, [(ANONYMOUS_PRIVATE, [bytes(PAGE)] * 2)])
    (tmp_path / "pagemap-1.img").write_bytes(ImageFile(HEAD, (message((1, 1)), entry)).content())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ImageFormatError, match=r"pagemap-1\.img"):
        drop_zero_pages(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_runs_end_where_the_mapping_ends() -> None:
    anonymous = Anonymous([(BASE, BASE + PAGE)])
    assert list(runs(bytes(3 * PAGE), BASE, anonymous)) == [Run(0, 1, True), Run(1, 2, False)]
    assert list(runs(bytes(PAGE), BASE - PAGE, anonymous)) == [Run(0, 1, False)]


_PROGRAM = """
import ctypes, mmap, os, signal, sys
PAGE = mmap.PAGESIZE
told, backing = sys.argv[1], sys.argv[2]
PRIVATE, ANONYMOUS = mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
half = mmap.mmap(-1, 3000 * PAGE, PRIVATE | ANONYMOUS)
for page in range(3000):
    half[page * PAGE] = page % 2          # odd pages carry something, even ones are zero
of_file = mmap.mmap(os.open(backing, os.O_RDWR), 8 * PAGE, PRIVATE)
of_file[: 4 * PAGE] = bytes(4 * PAGE)     # hides the file's own bytes
inherited = mmap.mmap(-1, 64 * PAGE, PRIVATE | ANONYMOUS)
inherited[:] = b"p" * (64 * PAGE)
shared = mmap.mmap(-1, 8 * PAGE)
shared[:] = bytes(8 * PAGE)
child = os.fork()
if not child:
    inherited[: 32 * PAGE] = bytes(32 * PAGE)
who = "parent" if child else "child"

def tell(*_):
    right = (
        all(half[p * PAGE] == p % 2 for p in range(3000))
        and not any(half[k] for p in range(0, 3000, 7) for k in range(p * PAGE + 1, p * PAGE + 64))
        and of_file[:] == bytes(4 * PAGE) + b"f" * (4 * PAGE)
        and inherited[: 32 * PAGE] == (b"p" if child else bytes(1)) * (32 * PAGE)
        and inherited[32 * PAGE :] == b"p" * (32 * PAGE)
        and shared[:] == bytes(8 * PAGE)
    )
    with open(f"{told}/{who}.tmp", "w") as file:
        file.write("right" if right else "wrong")
    os.rename(f"{told}/{who}.tmp", f"{told}/{who}")

signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
"""


def until(told: Path) -> dict[str, str]:
    deadline_s = time.monotonic() + 60
    while {path.name for path in told.iterdir()} != {"parent", "child"}:
        assert time.monotonic() < deadline_s, f"only {sorted(told.iterdir())} spoke"
        time.sleep(0.02)
    found = {path.name: path.read_text() for path in told.iterdir()}
    for path in told.iterdir():
        path.unlink()
    return found


def until_gone(group: int) -> None:
    """Waits until nothing, not even an unreaped child, stands in the way of the same pids."""
    deadline_s = time.monotonic() + 60
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(group, 0)
            time.sleep(0.02)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its child with memory of every kind, in a session of their own."""
    (tmp_path / "told").mkdir()
    (tmp_path / "backing").write_bytes(b"f" * 8 * PAGE)
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, tmp_path / "told", tmp_path / "backing"]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.root
def test_processes_put_back_without_their_zero_pages_are_right(
    tools: Tools, tmp_path: Path, tree: subprocess.Popen[bytes]
) -> None:
    told, images = tmp_path / "told", tmp_path / "images"
    images.mkdir()
    assert until(told) == {"parent": "right", "child": "right"}
    common = ["--images-dir", str(images), "--log-file", "criu.log", "-v4"]
    subprocess.run(
        [str(tools.criu), "dump", "--tree", str(tree.pid), *common], check=True, timeout=60
    )
    tree.wait()
    until_gone(tree.pid)
    before_bytes = sum(path.stat().st_size for path in images.glob("pages-*.img"))
    saved_bytes = drop_zero_pages(images)
    assert saved_bytes >= (1500 + 32) * PAGE
    after_bytes = sum(path.stat().st_size for path in images.glob("pages-*.img"))
    assert after_bytes == before_bytes - saved_bytes
    pid_file = tmp_path / "pid"
    restore = ["restore", "--restore-detached", "--pidfile", str(pid_file), *common]
    subprocess.run([str(tools.criu), *restore], check=True, timeout=60)
    assert int(pid_file.read_text()) == tree.pid
    os.killpg(tree.pid, signal.SIGUSR1)
    assert until(told) == {"parent": "right", "child": "right"}
