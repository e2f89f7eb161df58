import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.image.models import ModelFolder
from nagara.node.leftovers import owned_by
from nagara.store.ledger import read_pins


def demo(*prefix: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "demo"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=400,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(420)  # an empty store is filled first
def test_the_demo_answers_the_same_from_a_snapshot(
    smollm2: ModelFolder, tools: object, state_dir: Path, tmp_path: Path
) -> None:
    (state_dir / "store").mkdir(mode=0o700, exist_ok=True)
    for shared in ("models", "tools", "store"):
        (tmp_path / shared).symlink_to((state_dir / shared).resolve())
    done = demo(state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "both answers are equal" in done.stdout
    assert "restored start" in done.stdout
    assert "times faster" in done.stdout
    assert done.stdout.count("Paris") == 2
    assert "up examples/smollm2.toml" in done.stdout
    assert owned_by(tmp_path) == []
    assert re.search(r"ready it read \S+ .B of the \S+ GB in image and model", done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"models", "tools", "store"}
    assert not [pin for pin in read_pins(tmp_path / "store/ledger.sqlite") if "#" in pin.holder
                and str(tmp_path) in pin.holder]  # fmt: skip


@pytest.mark.slow
def test_the_demo_runs_without_root_and_says_what_is_missing(
    smollm2: ModelFolder, tmp_path: Path
) -> None:
    (tmp_path / "models").symlink_to(smollm2.path.parent.resolve())
    # An unmapped user namespace: every check of being root answers no, files stay readable.
    prefix = ["unshare", "--user"] if os.geteuid() == 0 and shutil.which("unshare") else []
    if os.geteuid() == 0 and not prefix:
        pytest.skip("needs unshare to give up root")
    tmp_path.chmod(0o755)
    done = demo(*prefix, state=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without root" in done.stdout
    assert "both answers are equal" in done.stdout
    assert "times faster" not in done.stdout


@pytest.mark.timeout(420)
def test_a_demo_that_is_terminated_leaves_nothing(
    smollm2: ModelFolder, state_dir: Path, tmp_path: Path
) -> None:
    (state_dir / "store").mkdir(mode=0o700, exist_ok=True)
    for shared in ("models", "store"):
        (tmp_path / shared).symlink_to((state_dir / shared).resolve())
    command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(tmp_path), "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        assert running.stdout is not None
        while b"a plain start" not in running.stdout.readline():
            pass
        running.terminate()
        running.stdout.read()
        assert running.wait() == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"models", "store"}
    assert owned_by(tmp_path) == []
