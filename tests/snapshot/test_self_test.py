import os
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.image.mounts import mount_points
from nagara.sandbox.cgroups import groups_beginning
from nagara.sandbox.tools import Tools
from nagara.snapshot.self_test import CONTROL_GROUP, SelfTestError, self_test

pytestmark = pytest.mark.root


@pytest.fixture
def unchanged(tmp_path: Path):
    """Nothing of a test stays on the machine, whatever came of it."""
    yield
    assert mount_points(tmp_path) == []
    assert groups_beginning(f"{CONTROL_GROUP}{os.getpid()}-") == []
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder) in (entry / "mountinfo").read_text():
                    found.append(entry.name)
            except OSError:
                continue
    return found


@pytest.mark.usefixtures("unchanged")
def test_a_server_is_saved_put_back_and_remembers(tools: Tools, tmp_path: Path) -> None:
    assert tools.runc is not None
    assert tools.criu is not None
    done = self_test(tools.runc, tools.criu, tmp_path)
    assert done.saved_in_s > 0
    assert done.restored_in_s > 0
    assert 1 << 20 < done.memory_bytes < 1 << 27


@pytest.mark.usefixtures("unchanged")
def test_a_criu_that_cannot_save_is_named(tools: Tools, tmp_path: Path) -> None:
    criu = tmp_path / "criu"
    criu.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Version: 4.2" && exit\nexit 3\n')
    criu.chmod(0o755)
    assert tools.runc is not None
    with pytest.raises(SelfTestError, match="could not save the process") as raised:
        self_test(tools.runc, criu, tmp_path)
    assert raised.value.where == str(criu)


@pytest.mark.usefixtures("unchanged")
def test_a_server_that_was_started_anew_instead_of_restored_is_noticed(
    tools: Tools, tmp_path: Path
) -> None:
    """A runc that succeeds at everything, but has no memory."""
    runc = tmp_path / "runc"
    runc.write_text(f"#!{sys.executable}\n{_FORGETFUL}\nos.execv({str(tools.runc)!r}, words)\n")
    runc.chmod(0o755)
    assert tools.criu is not None
    with pytest.raises(SelfTestError, match="answered b'' instead of"):
        self_test(runc, tools.criu, tmp_path)


@pytest.mark.usefixtures("unchanged")
def test_a_runc_that_makes_no_container_is_quoted(tools: Tools, tmp_path: Path) -> None:
    runc = tmp_path / "runc"
    runc.write_text("#!/bin/sh\necho no such container for you >&2\nexit 1\n")
    runc.chmod(0o755)
    assert tools.criu is not None
    with pytest.raises(SelfTestError, match=r"could not be made.*no such container for you"):
        self_test(runc, tools.criu, tmp_path)


_FORGETFUL = """
import os, sys
words = ["run" if word == "restore" else word for word in sys.argv]
for option in ("--image-path", "--work-path") if "restore" in sys.argv else ():
    del words[words.index(option) : words.index(option) + 2]
"""


@pytest.mark.usefixtures("unchanged")
def test_an_environment_of_copies_below_a_hidden_folder_is_no_hindrance(
    tools: Tools, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    make = [sys.executable, "-m", "venv", "--copies", "--without-pip", str(environment)]
    subprocess.run(make, check=True)
    program = (
        "import sys; from pathlib import Path; from nagara.snapshot.self_test import self_test; "
        "print(self_test(*map(Path, sys.argv[1:])))"
    )
    (tmp_path / "scratch").mkdir()
    done = subprocess.run(
        [environment / "bin/python", "-c", program, tools.runc, tools.criu, tmp_path / "scratch"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("SelfTest(saved_in_s="), done.stderr
