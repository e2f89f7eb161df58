"""The mechanism by which tests make processes fail at named moments."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.sandbox.fault_points import POINTS, VARIABLE, reach

ALL = [f"{group}.{name}" for group, names in POINTS.items() for name in names]


def test_every_point_of_the_table_is_in_the_code_once_and_no_other_is(capsys):
    sources = (Path(__file__).parent.parent.parent / "src/nagara").rglob("*.py")
    text = "\n".join(path.read_text() for path in sources)
    assert {point: text.count(f'reach("{point}")') for point in ALL} == dict.fromkeys(ALL, 1)
    assert text.count('reach("') == len(ALL)
    with capsys.disabled():
        print(f"\n{len(ALL)} fault points: " + ", ".join(f"{g} {len(POINTS[g])}" for g in POINTS))


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    reach(ALL[0])


def test_a_full_disk_is_found_once_at_the_point_wanted(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fault"))
    reach(ALL[0])
    (tmp_path / "fault").write_text(f"full {ALL[1]}")
    reach(ALL[0])
    with pytest.raises(OSError, match="No space left"):
        reach(ALL[1])
    reach(ALL[1])


def test_a_process_is_killed_as_by_the_kernel(tmp_path):
    fault = tmp_path / "fault"
    fault.write_text(f"kill {ALL[0]}")
    code = f"from nagara.sandbox.fault_points import reach; reach({ALL[0]!r}); print('survived')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: str(fault)}, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
    assert not fault.exists()
