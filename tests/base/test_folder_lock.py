import subprocess
import sys
from pathlib import Path

from nagara.base.folder_lock import folder_lock

TRY = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
"""


def seen_by_another_process(folder: Path) -> str:
    command = [sys.executable, "-c", TRY, str(folder / ".lock")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_folder_is_made_and_held_against_other_processes_until_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with folder_lock(folder):
        assert seen_by_another_process(folder) == "held"
    assert seen_by_another_process(folder) == "free"
