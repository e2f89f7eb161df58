"""The waiting loop's length is set before torch loads, and never against the user's own wish."""

import os
import subprocess
import sys

from nagara.engine.openmp import SPIN_COUNT, be_patient


def test_a_setting_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    be_patient()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_without_one_threads_sleep_soon(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    be_patient()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_it_is_set_without_loading_torch():
    code = "import sys, nagara.engine.openmp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
