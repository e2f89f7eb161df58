"""The machine's own tree as an image: what is hidden, what is bound in."""

import stat
from pathlib import Path

import pytest

from nagara.image.host import HostImage
from nagara.image.mounts import mount_overlay


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def image(state: Path, *needed: Path) -> HostImage:
    return HostImage(state=state, needed=needed)


@pytest.fixture
def root(mounts):
    """The image with a layer of its own, as a replica sees it."""
    (mounts / "state/secret").mkdir(parents=True)
    for part in ("state/upper", "state/work", "state/root"):
        (mounts / part).mkdir()
    made = image(mounts / "state")
    made.prepare_upper(mounts / "state/upper")
    mount_overlay(made.layers, mounts / "state/upper", mounts / "state/work", mounts / "state/root")
    return mounts / "state/root"


@pytest.mark.root
def test_homes_temporary_and_run_time_files_are_hidden(root):
    for folder in ("root", "tmp", "run"):
        inside = root / folder
        # In `tmp` lies the way to the state folder itself, which is hidden in turn.
        assert names_in(inside) <= {root.parts[2]}
        assert stat.S_IMODE(inside.stat().st_mode) == stat.S_IMODE(Path("/", folder).stat().st_mode)


@pytest.mark.root
def test_password_hashes_and_private_keys_are_hidden(root):
    for name in ("shadow", "gshadow", "shadow-", "gshadow-"):
        assert not (root / "etc" / name).exists()
    for folder in ("etc/ssh", "etc/ssl/private"):
        assert not (root / folder).exists() or not names_in(root / folder)
    assert (root / "etc/passwd").read_bytes() == Path("/etc/passwd").read_bytes()


@pytest.mark.root
def test_the_state_folder_is_hidden(root):
    state = root.parent
    assert (state / "secret").exists()
    inside = root / state.relative_to("/")
    assert not inside.exists() or not names_in(inside)


@pytest.mark.root
def test_parents_of_hidden_folders_keep_their_modes_and_owners(root):
    for part in ("etc", "var", "tmp"):
        theirs, ours = (root / part).stat(), Path("/", part).stat()
        assert (theirs.st_mode, theirs.st_uid, theirs.st_gid) == (
            ours.st_mode,
            ours.st_uid,
            ours.st_gid,
        )


@pytest.mark.root
def test_programs_of_the_machine_are_there(root):
    assert (root / "bin/sh").exists()


def test_a_needed_folder_below_a_hidden_one_is_bound(tmp_path):
    state, needed = tmp_path / "state", tmp_path / "needed"
    state.mkdir()
    (needed / "inner").mkdir(parents=True)
    bound = image(state, needed, needed / "inner", tmp_path / "missing").bound_folders()
    if tmp_path.is_relative_to("/tmp"):
        assert bound == (needed.resolve(),)


def test_a_needed_folder_around_the_state_is_not_bound(tmp_path):
    state = tmp_path / "project/.state"
    (state / "node").mkdir(parents=True)
    inside, around = tmp_path / "project/src", tmp_path / "project"
    inside.mkdir()
    bound = image(state, around, inside, tmp_path).bound_folders()
    assert bound == (inside,)


def test_a_needed_folder_that_is_visible_anyway_is_not_bound(tmp_path):
    assert image(tmp_path, Path("/usr")).bound_folders() == ()


def test_a_needed_folder_on_another_file_system_is_bound(tmp_path):
    if Path("/dev/shm").stat().st_dev == Path("/").stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    assert image(tmp_path, Path("/dev/shm")).bound_folders() == (Path("/dev/shm"),)


def test_the_fingerprint_is_the_same_while_nothing_is_installed(tmp_path):
    made = image(tmp_path)
    assert made.fingerprint() == made.fingerprint()
    assert made.fingerprint().startswith("host;")
