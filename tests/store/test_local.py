import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nagara.base.errors import UsageError
from nagara.base.linux import MNT_DETACH, MS_NODEV, mount, unmount
from nagara.store.errors import FullError
from nagara.store.hashing import hash_file
from nagara.store.ledger import Pin
from nagara.store.local import LocalTier, ObjectFolder
from nagara.store.names import ObjectName, name_bytes, pack_names
from nagara.store.store import Store
from nagara.testing.objects import chunk_list, noise


def add(tier: LocalTier, content: bytes) -> ObjectName:
    tier.folder.make_room(len(content))
    with tier.temporary() as path:
        path.write_bytes(content)
        name = name_bytes(content)
        tier.adopt(path, name, chunk_list(content).to_bytes() if name.is_chunked else None)
    return name


def content_of(tier: LocalTier, name: ObjectName) -> bytes | None:
    descriptor = tier.open(name)
    if descriptor is None:
        return None
    try:
        return os.pread(descriptor, name.size, 0)
    finally:
        os.close(descriptor)


def flip(path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def test_what_was_added_is_read_back_and_cannot_be_written_by_others(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path)
    tier = folder.tenant("default")
    name = add(tier, b"hello")
    assert content_of(tier, name) == b"hello"
    assert tier.path(name).stat().st_mode & 0o777 == 0o444
    assert list(tier.partial.iterdir()) == []
    folder.close()


def test_an_object_is_trusted_without_reading_only_when_it_was_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path)
    name = add(folder.tenant("default"), noise(1000))
    folder.close()
    again = ObjectFolder(tmp_path)
    read = []
    monkeypatch.setattr("nagara.store.local.hash_file", lambda *_: read.append(1))
    assert content_of(again.tenant("default"), name) == noise(1000)
    assert read == []
    again.close()


@pytest.mark.parametrize("size", [1, 1000, (64 << 20) + 1])
def test_a_flipped_byte_is_found_at_the_next_open_and_the_object_removed(
    tmp_path: Path, size: int
) -> None:
    folder = ObjectFolder(tmp_path)
    tier = folder.tenant("default")
    name = add(tier, noise(size))
    folder.syncer.flush()
    flip(tier.path(name))
    assert content_of(tier, name) is None
    assert not tier.path(name).exists()
    assert folder.ledger.total_bytes() == 0
    folder.close()


def test_a_truncated_object_is_not_there(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path)
    tier = folder.tenant("default")
    name = add(tier, noise(1000))
    tier.path(name).chmod(0o644)
    os.truncate(tier.path(name), 999)
    assert not tier.has(name)
    assert content_of(tier, name) is None
    folder.close()


def test_small_contents_are_kept_many_at_a_time(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path)
    tier = folder.tenant("default")
    contents = [noise(1000 + seed, seed) for seed in range(50)]
    names = [name_bytes(content) for content in contents]
    tier.keep([(name, memoryview(c)) for name, c in zip(names, contents, strict=True)])
    tier.keep([(names[0], contents[0])])  # again is no error
    assert [content_of(tier, name) for name in names] == contents
    assert [oct(tier.path(name).stat().st_mode & 0o777) for name in names] == ["0o444"] * 50
    folder.syncer.flush()
    assert all(folder.ledger.proof("default", str(name)) for name in names)
    assert folder.ledger.count("default") == (50, 50 * 4096)
    assert list(tier.partial.iterdir()) == []
    folder.close()


def test_many_contents_that_find_no_room_are_refused_together(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, limit_bytes=100_000)
    tier = folder.tenant("default")
    contents = [noise(10_000, seed) for seed in range(20)]
    with pytest.raises(FullError):
        tier.keep([(name_bytes(content), content) for content in contents])
    assert folder.ledger.count("default") == (0, 0)
    folder.close()


def test_the_longest_unused_objects_go_first_and_the_bound_is_kept(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, limit_bytes=10 * 65536)
    tier = folder.tenant("default")
    names = []
    for seed in range(9):
        names.append(add(tier, noise(65536, seed)))
        time.sleep(0.002)
    assert content_of(tier, names[0]) is not None  # used again: now the youngest
    for seed in range(9, 13):
        names.append(add(tier, noise(65536, seed)))
        assert folder.ledger.total_bytes() <= 10 * 65536
    there = [index for index, name in enumerate(names) if tier.has(name)]
    assert 0 in there
    assert 1 not in there
    assert {9, 10, 11, 12} <= set(there)
    folder.close()


def test_what_a_pin_names_is_never_evicted_and_then_there_is_no_room(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, limit_bytes=6 * 65536)
    tier = folder.tenant("default")
    pinned = [add(tier, noise(65536, seed)) for seed in range(4)]
    listing = add(tier, pack_names(pinned))
    folder.ledger.pin(Pin("mount", "default", str(listing)))
    for seed in range(10, 20):
        add(tier, noise(65536, seed))
    assert all(tier.has(name) for name in (*pinned, listing))
    with pytest.raises(FullError):
        folder.make_room(3 * 65536)
    folder.ledger.unpin("mount")
    folder.make_room(5 * 65536)
    folder.close()


def test_when_a_pinned_list_is_lost_nothing_of_its_tenant_is_evicted(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, limit_bytes=65536)
    tier = folder.tenant("default")
    name = add(tier, noise(60000))
    folder.ledger.pin(Pin("mount", "default", "a" * 52 + ".40"))
    with pytest.raises(FullError):
        folder.make_room(60000)
    assert tier.has(name)
    folder.close()


def test_complete_images_are_forgotten_when_something_unpinned_went(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, limit_bytes=65536)
    tier = folder.tenant("default")
    name = add(tier, noise(60000))
    folder.ledger.set_complete("default", "some", "boot")
    assert folder.ledger.is_complete("default", "some", "boot")
    assert not folder.ledger.is_complete("default", "some", "another boot")
    folder.make_room(60000)
    assert not tier.has(name)
    assert not folder.ledger.is_complete("default", "some", "boot")
    folder.close()


def test_two_processes_share_one_bound(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom nagara.store.local import ObjectFolder\n"
        "from nagara.store.names import name_bytes\n"
        "folder = ObjectFolder(Path(sys.argv[1]), 20 * 65536)\ntier = folder.tenant('default')\n"
        "for i in range(40):\n"
        "    data = (sys.argv[2] + str(i)).encode().ljust(65536, b'x')\n"
        "    folder.make_room(65536)\n"
        "    with tier.temporary() as path:\n"
        "        path.write_bytes(data)\n"
        "        tier.adopt(path, name_bytes(data), None)\n"
        "folder.close()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*command, word]) for word in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    folder = ObjectFolder(tmp_path, 20 * 65536)
    tier = folder.tenant("default")
    files = list(tier.objects.iterdir())
    assert len(files) * 65536 == folder.ledger.total_bytes() <= 22 * 65536
    folder.close()


def test_many_processes_open_a_new_folder_at_once(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom nagara.store.local import ObjectFolder\n"
        "print(flush=True)\n"
        "for line in sys.stdin:\n"
        "    ObjectFolder(Path(line.strip())).close()\n    print(flush=True)\n"
    )
    command = [sys.executable, "-c", script]
    openers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "\n"
    paths = "".join(f"{tmp_path / str(number)}\n" for number in range(50))
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write(paths)
        opener.stdin.flush()
    for opener in openers:
        out, _ = opener.communicate(timeout=120)
        assert (opener.returncode, out.count("\n")) == (0, 50)


def test_an_object_that_another_process_evicts_at_once_is_gone_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path)
    tier, add_row = folder.tenant("default"), folder.ledger.add
    content = noise(10_000)
    rows = []

    def evicted_after_the_second_row(tenant: str, name: str, space: int) -> None:
        add_row(tenant, name, space)
        rows.append(name)
        if len(rows) == 2:
            tier.path(name_bytes(content)).unlink()

    monkeypatch.setattr(folder.ledger, "add", evicted_after_the_second_row)
    name = add(tier, content)
    assert not tier.has(name)
    assert folder.ledger.count("default") == (0, 0)
    folder.close()


def test_opening_a_folder_reads_no_object_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path)
    name = add(folder.tenant("default"), b"x")
    folder.close()
    for scan in ("iterdir", "glob", "rglob"):
        monkeypatch.setattr(Path, scan, lambda *_: pytest.fail("the folder was scanned"))
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("the folder was scanned"))
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("the folder was scanned"))
    again = ObjectFolder(tmp_path, 1 << 20)
    assert again.tenant("default").has(name)
    again.make_room(1000)
    again.close()


def test_a_killed_writer_leaves_nothing_that_looks_like_an_object(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom nagara.store.local import ObjectFolder\n"
        "tier = ObjectFolder(Path(sys.argv[1])).tenant('default')\n"
        "with tier.temporary() as path:\n"
        "    path.write_bytes(b'half')\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert done.returncode == -9
    folder = ObjectFolder(tmp_path)
    assert list(folder.tenant("default").objects.iterdir()) == []
    folder.close()


def test_a_row_whose_file_never_came_is_evicted_like_any_other(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 65536)
    folder.ledger.add("default", "a" * 52 + ".60000", 60000)  # then the process died
    folder.make_room(60000)
    assert folder.ledger.total_bytes() == 0
    folder.close()


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "A", "a.b", "-a", "x" * 64])
def test_a_tenant_is_a_plain_word(tmp_path: Path, tenant: str) -> None:
    folder = ObjectFolder(tmp_path)
    with pytest.raises(UsageError):
        folder.tenant(tenant)
    folder.close()


def test_the_ledger_survives_being_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom nagara.store.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\nledger.add('default', 'x', 5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "ledger")], timeout=60)
    with sqlite3.connect(tmp_path / "ledger") as connection:
        assert connection.execute("SELECT space FROM total").fetchone() == (5,)
    connection.close()


def test_many_who_open_an_unproven_object_at_once_share_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path)
    tier = folder.tenant("default")
    name = add(tier, noise(500_000))
    folder.syncer.flush()
    tier.path(name).chmod(0o440)  # changes its change time: nothing is proven
    readings = []

    def slow(*arguments: Any) -> Any:
        readings.append(1)
        time.sleep(0.2)
        return hash_file(*arguments)

    monkeypatch.setattr("nagara.store.local.hash_file", slow)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: content_of(tier, name), range(16))) == [noise(500_000)] * 16
    assert readings == [1]
    folder.close()


@pytest.mark.root
def test_on_a_full_disk_pins_and_objects_can_still_be_given_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("test", disk, "tmpfs", MS_NODEV, "size=4m")
    try:
        folder = ObjectFolder(disk)
        store = Store(folder.tenant("default"))
        names = [store.put_bytes(noise(100_000, seed)) for seed in range(8)]
        folder.ledger.pin(Pin("holder", "default", str(names[0])))
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

        def pin_many() -> None:  # however much the database had in stock
            for number in range(10_000):
                folder.ledger.pin(Pin(f"holder-{number}", "default", str(names[0])))

        with pytest.raises(FullError):
            pin_many()
        folder.ledger.unpin("holder")
        assert "holder" not in {pin.holder for pin in folder.ledger.pins()}
        (disk / "other").unlink()
        folder.ledger.unpin("holder-0")  # and the room is kept again
        assert (disk / "ledger.sqlite.reserve").stat().st_blocks > 0
        store.close()
        folder.close()
    finally:
        unmount(disk, MNT_DETACH)
