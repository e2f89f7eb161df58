import fcntl
from pathlib import Path

from nagara.sandbox.lock_holders import is_locked
from nagara.sandbox.scratch import LOCK, scratch_folder


def test_a_lock_is_seen_without_being_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with path.open("w") as file:
        assert not is_locked(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(path)
    assert not is_locked(path)


def test_a_scratch_folder_is_locked_while_it_is_used_and_gone_afterwards(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert is_locked(folder / LOCK)
    assert list(tmp_path.iterdir()) == []


def test_without_a_state_folder_the_scratch_lies_where_that_will_be(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "not/yet") as folder:
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
