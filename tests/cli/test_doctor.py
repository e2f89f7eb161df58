import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli.main import main


def doctor(*arguments: str, state: Path, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "nagara.cli.main", "--state", str(state), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, "COLUMNS": "110"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_without_root_it_says_what_is_lacking_and_how_to_get_it(tmp_path: Path) -> None:
    # An unmapped user namespace: every check of being root answers no, files stay readable.
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if not shutil.which("unshare"):
            pytest.skip("needs unshare to give up root")
        prefix = ("unshare", "--user")
    tmp_path.chmod(0o777)
    code, shown, said = doctor("doctor", "--json", state=tmp_path, prefix=prefix)
    assert code == 0, said
    document = json.loads(shown)
    assert set(document) == {"nagara", "machine", "containers", "snapshots", "capabilities"}
    assert (document["containers"], document["snapshots"]) == (False, False)
    found = {entry.pop("name"): entry for entry in document["capabilities"]}
    assert set(found["root"]) == {"status", "detail", "purpose", "without", "get"}
    assert found["root"]["status"] == "lacking"
    assert "plain processes" in found["root"]["without"]
    assert found["checkpoint"]["status"] == "untried"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_people_get_a_table_and_the_remedies(tmp_path: Path) -> None:
    code, shown, said = doctor("doctor", state=tmp_path)
    assert code == 0, said
    assert "replicas run as" in shown
    assert "network_namespaces" in shown
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def test_clearing_is_a_part_of_looking_for_leaks(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["--state", str(tmp_path), "doctor", "--clear"])
    assert shown.exit_code == 2
    assert "--leaks" in shown.stderr


def test_a_machine_without_nagara_has_no_leaks(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["--state", str(tmp_path), "doctor", "--leaks", "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == {"state": str(tmp_path), "orphaned": 0, "owned": []}
