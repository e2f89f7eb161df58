"""A layer made immutable means the same as the layer it was made of."""

import os
import socket
import stat
from pathlib import Path

import pytest

from nagara.image.frozen import FreezeError, freeze, manifest
from nagara.image.mounts import mount_erofs, mount_overlay

pytestmark = pytest.mark.root


@pytest.fixture
def stack(mounts, monkeypatch):
    """A base tree with things to delete, and the way to write above it."""
    if os.system("command -v mkfs.erofs >/dev/null") != 0:
        pytest.skip("needs mkfs.erofs (package erofs-utils)")
    return Stack(mounts)


class Stack:
    """base ← upper, and then base ← frozen upper ← another upper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = folder / "base"
        for name in ("base/kept", "base/emptied", "base/replaced", "base/removed"):
            (folder / name).mkdir(parents=True)
            (folder / name / "old").write_text("old")
        (self.base / "deleted").write_text("old")
        (self.base / "changed").write_text("old")
        self.root = self._overlay("first", [self.base])

    def _overlay(self, name: str, lower: list[Path]) -> Path:
        parts = {part: self.folder / name / part for part in ("upper", "work", "root")}
        for path in parts.values():
            path.mkdir(parents=True)
        mount_overlay(lower, parts["upper"], parts["work"], parts["root"])
        return parts["root"]

    def frozen(self) -> Path:
        """The layer as a mounted EROFS file."""
        freeze(self.folder / "first/upper", self.folder / "layer.erofs")
        (self.folder / "frozen").mkdir()
        mount_erofs(self.folder / "layer.erofs", self.folder / "frozen")
        return self.folder / "frozen"

    def again(self) -> Path:
        """The root as it is with the frozen layer below a new upper layer."""
        return self._overlay("second", [self.frozen(), self.base])


def test_deletions_stay_deleted(stack):
    (stack.root / "deleted").unlink()
    (stack.root / "removed/old").unlink()
    (stack.root / "removed").rmdir()
    root = stack.again()
    assert not (root / "deleted").exists()
    assert not (root / "removed").exists()
    assert (root / "kept/old").read_text() == "old"


def test_a_folder_made_anew_does_not_show_what_was_below(stack):
    (stack.root / "replaced/old").unlink()
    (stack.root / "replaced").rmdir()
    (stack.root / "replaced").mkdir()
    (stack.root / "replaced/new").write_text("new")
    root = stack.again()
    assert [path.name for path in (root / "replaced").iterdir()] == ["new"]


def test_a_renamed_file_of_the_base_is_at_its_new_name_alone(stack):
    (stack.root / "changed").rename(stack.root / "moved")
    root = stack.again()
    assert (root / "moved").read_text() == "old"
    assert not (root / "changed").exists()


def test_changed_and_new_files_keep_content_owner_mode_and_time(stack):
    (stack.root / "changed").write_text("new")
    program = stack.root / "program"
    program.write_bytes(b"x" * 10_000_000)
    os.chown(program, 1234, 4321)
    program.chmod(0o6755)
    os.utime(program, ns=(10**18, 10**18 + 123_456_789))
    root = stack.again()
    assert (root / "changed").read_text() == "new"
    state = (root / "program").stat()
    assert (state.st_uid, state.st_gid, stat.S_IMODE(state.st_mode)) == (1234, 4321, 0o6755)
    assert state.st_mtime_ns == 10**18 + 123_456_789
    assert (root / "program").read_bytes() == b"x" * 10_000_000


def test_links_sockets_and_fifos_are_kept(stack):
    (stack.root / "one").write_text("x")
    os.link(stack.root / "one", stack.root / "two")
    (stack.root / "symlink").symlink_to("/nowhere/" + "x" * 200)
    os.mkfifo(stack.root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(stack.root / "socket"))
    root = stack.again()
    assert (root / "one").stat().st_nlink == 2
    assert (root / "one").samefile(root / "two")
    assert str((root / "symlink").readlink()) == "/nowhere/" + "x" * 200
    assert (root / "fifo").is_fifo()
    assert (root / "socket").is_socket()


def test_extended_attributes_are_kept_and_overlay_notes_to_itself_are_not(stack):
    (stack.root / "changed").write_text("new")
    os.setxattr(stack.root / "changed", "user.note", b"v" * 1000)
    os.setxattr(stack.root / "changed", "trusted.note", b"t")
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    os.setxattr(stack.root / "changed", "security.capability", capability)
    frozen = stack.frozen()
    assert os.getxattr(frozen / "changed", "user.note") == b"v" * 1000
    assert os.getxattr(frozen / "changed", "trusted.note") == b"t"
    assert os.getxattr(frozen / "changed", "security.capability") == capability
    assert not [name for name in os.listxattr(frozen / "changed") if "overlay" in name]


def test_names_of_any_bytes_are_kept(stack):
    names = {os.fsdecode(name) for name in (b"\xff\xfe", b"new\nline", b"x" * 254)}
    for name in names:
        (stack.root / name).touch()
    root = stack.again()
    assert names <= {path.name for path in root.iterdir()}


def test_a_name_of_full_length_is_kept_or_refused_but_never_lost(stack):
    (stack.root / ("x" * 255)).touch()
    try:
        root = stack.again()
    except FreezeError:  # mkfs.erofs 1.5 takes 254 bytes
        return
    assert (root / ("x" * 255)).exists()


def test_the_frozen_layer_lists_what_was_frozen(stack):
    (stack.root / "deleted").unlink()
    (stack.root / "changed").write_text("longer than before")
    before = manifest(stack.folder / "first/upper")
    assert before["changed"][2] == len("longer than before")
    assert stat.S_ISCHR(before["deleted"][0])
    assert manifest(stack.frozen()) == before


def test_the_frozen_layer_cannot_be_written(stack):
    frozen = stack.frozen()
    with pytest.raises(OSError, match="Read-only"):
        (frozen / "x").write_text("")


def test_an_empty_layer_can_be_frozen(stack):
    assert manifest(stack.frozen()) == {}


def test_a_missing_layer_is_an_error(stack):
    with pytest.raises(FreezeError):
        freeze(stack.folder / "none", stack.folder / "layer.erofs")


def test_without_the_tool_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FreezeError, match="erofs-utils"):
        freeze(tmp_path, tmp_path / "layer.erofs")
