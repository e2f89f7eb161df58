"""`nagara snapshot`: what is saved, and why an app has nothing."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli.main import main
from nagara.snapshot.catalog import Catalog, FileMark, SnapshotRecord
from nagara.snapshot.variant import Variant


def publish(state: Path, app: str, *, notes: tuple[str, ...] = (), mark: Path | None = None) -> str:
    catalog = Catalog(state / "snapshots")
    staging = catalog.staging()
    catalog.make_staging(staging)
    (staging / "memory/pages-1.img").write_bytes(b"m" * 100)
    (staging / "layer.erofs").write_bytes(b"l" * 10)
    marks = (FileMark(str(mark), 1, 1),) if mark else ()
    record = SnapshotRecord(
        key="k",
        variant=Variant(frozenset({"avx"}), 1, 64),
        canary_answer="200 x",
        host_files=marks,
        files={},
        layer_digest="d",
        created_at_s=1.0,
        memory_bytes=100,
        layer_bytes=10,
        notes=notes,
    )
    return catalog.publish(staging, "default", app, record).name


def run(state: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["--state", str(state), "snapshot", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_is_saved_is_listed_with_its_state_and_what_was_left_out(tmp_path: Path) -> None:
    publish(tmp_path, "good", notes=("a connection leads out",))
    publish(tmp_path, "stale", mark=tmp_path / "gone")
    bad = publish(tmp_path, "bad")
    (tmp_path / "snapshots/default/bad/k" / bad / "bad").write_text("crashed\ncrashed again\n")
    broken = publish(tmp_path, "broken")
    (tmp_path / "snapshots/default/broken/k" / broken / "snapshot.json").write_text("{")
    rows = {row["app"]: row for row in json.loads(run(tmp_path, "ls", "--json"))["snapshots"]}
    states = {app: row["state"] for app, row in rows.items()}
    assert states == {
        "good": "good", "stale": "stale", "bad": "in quarantine", "broken": "damaged",
    }  # fmt: skip
    assert rows["good"]["size_bytes"] == 110
    text = run(tmp_path, "ls")
    assert "good: not carried: a connection leads out" in text
    assert "bad: failed: crashed again" in text
    assert "has changed since it was made" in text


def test_one_is_shown_by_its_name_or_its_apps(tmp_path: Path) -> None:
    name = publish(tmp_path, "good")
    publish(tmp_path, "other")
    (shown,) = json.loads(run(tmp_path, "show", "good"))
    assert shown == json.loads(run(tmp_path, "show", name))[0]
    assert shown["cpu_flags"] == ["avx"]
    done = CliRunner().invoke(main, ["--state", str(tmp_path), "snapshot", "show", "nobody"])
    assert done.exit_code == 2
    assert "nagara snapshot ls" in done.output


def test_the_module_for_servers_without_nagara_is_printed_as_it_is(tmp_path: Path) -> None:
    text = run(tmp_path, "hooks")
    assert "def after_restore" in text
    compile(text, "nagara_hooks.py", "exec")
    assert "import nagara" not in text


@pytest.mark.parametrize("command", ["ls", "show"])
def test_each_says_what_it_does(command: str, tmp_path: Path) -> None:
    assert "snapshots" in run(tmp_path, command, "--help")
