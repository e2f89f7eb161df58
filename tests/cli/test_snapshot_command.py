"""`nagara snapshot`: what is saved, and why an app has nothing."""

import json
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli.main import main
from nagara.cli.opened_store import opened_catalog
from nagara.cli.settings import Settings
from nagara.snapshot.catalog import FileMark, Snapshot, SnapshotRecord, snapshot_from
from nagara.snapshot.variant import Variant


def publish(
    state: Path, app: str, *, notes: tuple[str, ...] = (), mark: Path | None = None
) -> Snapshot:
    with opened_catalog(Settings(state)) as catalog:
        staging = catalog.staging()
        catalog.make_staging(staging)
        (staging / "memory/pages-1.img").write_bytes(secrets.token_bytes(9000))
        (staging / "layer.erofs").write_bytes(b"l" * 4096)
        record = SnapshotRecord(
            key="k",
            variant=Variant(frozenset({"avx"}), 1, 64),
            canary_answer="200 x",
            host_files=(FileMark(str(mark), 1, 1),) if mark else (),
            layer_digest="d",
            created_at_s=1.0,
            memory_bytes=9000,
            layer_bytes=4096,
            notes=notes,
        )
        put = catalog.publish(staging, "default", app, record)
        snapshot = snapshot_from("default", put.shelved)
        assert snapshot is not None
        return snapshot


def run(state: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["--state", str(state), "snapshot", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_is_saved_is_listed_with_its_state_and_what_was_left_out(tmp_path: Path) -> None:
    publish(tmp_path, "good", notes=("a connection leads out",))
    publish(tmp_path, "stale", mark=tmp_path / "gone")
    bad = publish(tmp_path, "bad")
    with opened_catalog(Settings(tmp_path)) as catalog:
        for reason in ("crashed", "crashed again"):
            catalog.count_bad(bad, reason)
    broken = publish(tmp_path, "broken").image.name
    root = tmp_path / "store/tenants/default/roots/snapshots" / broken
    root.chmod(0o644)
    root.write_text("{")
    rows = {row["app"]: row for row in json.loads(run(tmp_path, "ls", "--json"))["snapshots"]}
    states = {app: row["state"] for app, row in rows.items()}
    assert states == {
        "good": "good", "stale": "stale", "bad": "in quarantine", "broken": "damaged",
    }  # fmt: skip
    assert rows["good"]["size_bytes"] == 13096
    text = run(tmp_path, "ls")
    assert "good: not carried: a connection leads out" in text
    assert "bad: failed: crashed again" in text
    assert "has changed since it was made" in text


def test_one_is_shown_by_its_name_or_its_apps(tmp_path: Path) -> None:
    name = publish(tmp_path, "good").name
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
