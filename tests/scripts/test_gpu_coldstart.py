"""The script for a lent GPU: without one it measures what it can and says why not the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.sandbox.tools import Tools

SCRIPT = Path(__file__).parents[2] / "bench/gpu_coldstart.py"
COMMAND = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny", "--no-compile"]


def run(tmp_path, *more):
    command = [*COMMAND, "--scratch", str(tmp_path), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is left, no process works there
    return json.loads(done.stdout)["shapes"]["tiny"], done.stderr


@pytest.mark.slow
def test_each_part_is_measured_or_skipped_with_its_reason(tmp_path):
    found, shown = run(tmp_path, "--parts", "link,weights,plain,device,full", "--criu", "/none")
    assert found["link"] == {"skipped": "there is no link without a device"}
    assert found["device"] == {"skipped": "there is no device"}
    assert "CRIU" in found["full"]["skipped"] or "root" in found["full"]["skipped"]
    assert found["weights"]["page_cache_gb_s"] > 0
    stages = found["plain"]["stages"]
    assert {"libraries", "context", "weights", "compile and graphs", "first token"} <= set(stages)
    assert sum(stages.values()) <= found["plain"]["total_s"]
    assert "skipped: there is no device" in shown


def test_an_unknown_part_is_named(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--parts", "plain,dance"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "no such part: dance" in done.stderr


@pytest.mark.root
@pytest.mark.slow
def test_the_host_part_works_where_there_is_a_checkpoint_tool(tmp_path, tools: Tools):
    assert tools.criu is not None
    found, _ = run(tmp_path, "--parts", "full", "--criu", os.fspath(tools.criu))
    assert "skipped" not in found["full"], found["full"]
    assert found["full"]["tokens_equal"] is True
    assert found["full"]["snapshot_bytes"] > 0
    assert found["full"]["stages"]["device"] < found["full"]["total_s"]
