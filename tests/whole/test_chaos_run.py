"""The chaos run of `make chaos`, short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/chaos.py"


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for containers and a disk of its own")
def test_no_request_is_lost_without_a_fault_and_nothing_is_done_twice(state_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "25"],
        env={**os.environ, "NAGARA_STATE": str(state_dir)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "all is well" in done.stdout
