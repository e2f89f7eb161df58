"""`nagara snapshot`: what is saved, and why an app has nothing."""

import json
import secrets
from pathlib import Path
from typing import Any

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
            key="0f",
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
    (shown,) = json.loads(run(tmp_path, "show", "good"))
    assert shown["stored_bytes"] > 13096
    assert shown["shared_bytes"] == 0
    publish(tmp_path, "other")
    (shown,) = json.loads(run(tmp_path, "show", "good"))
    assert shown["shared_bytes"] == 4096  # the same frozen layer
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


def fails(state: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["--state", str(state), "snapshot", *arguments])
    assert done.exit_code == 2, done.output
    return done.output


def told(state: Path, *arguments: str) -> list[dict[str, Any]]:
    rows = json.loads(run(state, *arguments, "--json"))["snapshots"]
    assert isinstance(rows, list)
    return rows


def state_of(state: Path, app: str) -> str:
    (row,) = [row for row in told(state, "ls") if row["app"] == app]
    return str(row["state"])


def far_folder(*states: Path) -> None:
    """A tier that the machines share."""
    far = states[0] / "far"
    far.mkdir()
    for state in states:
        (state / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
        tier = {"kind": "folder", "path": str(far), "name": "zone"}
        (state / "store/settings.json").write_text(json.dumps({"tiers": [tier]}))


def test_a_verification_names_the_file_with_a_wrong_byte_and_puts_it_aside(tmp_path: Path) -> None:
    name = publish(tmp_path, "good").name
    assert f"{name} is right" in run(tmp_path, "verify", "good")
    (shown,) = json.loads(run(tmp_path, "show", name))
    (pages,) = [each for each in shown["objects"] if each["path"] == "memory/pages-1.img"]
    path = tmp_path / "store/tenants/default/sha256" / pages["object"]
    content = bytearray(path.read_bytes())
    content[4321] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    done = CliRunner().invoke(main, ["--state", str(tmp_path), "snapshot", "verify", "good"])
    assert done.exit_code == 1
    assert "is in quarantine: wrong: memory/pages-1.img" in done.stdout
    assert state_of(tmp_path, "good") == "in quarantine"
    assert "wrong bytes in memory/pages-1.img" in run(tmp_path, "ls")
    assert told(tmp_path, "verify", "good")[0]["not_here"] == ["memory/pages-1.img"]
    far_folder(tmp_path)
    assert "is in quarantine" in fails(tmp_path, "push", "good", "--to", "zone")


def test_a_snapshot_goes_by_a_tier_from_one_machine_to_another(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    far_folder(one, other)
    first, second = publish(one, "good"), publish(one, "good")
    publish(one, "other")
    sent = told(one, "push", "good", "--to", "zone")
    assert {row["snapshot"] for row in sent} == {first.name, second.name}
    # The frozen layer of both is the same.
    assert sorted(row["moved_objects"] for row in sent) == [3, 4]
    assert all(row["moved_objects"] == 0 for row in told(one, "push", "good", "--to", "zone"))
    assert "no tier that was asked" in fails(other, "pull", "other")
    (brought,) = told(other, "pull", "good")[:1]
    assert brought["moved_objects"] == 3  # its list came before
    assert {row["snapshot"] for row in told(other, "ls")} == {first.name, second.name}
    assert json.loads(run(one, "show", first.name)) == json.loads(run(other, "show", first.name))
    (gone,) = told(other, "rm", first.name, "--from", "zone")
    assert gone["snapshot"] == first.name
    assert [row["snapshot"] for row in told(one, "pull", "good")] == [second.name]
    run(other, "rm", "good")
    assert told(other, "ls") == []
    assert [row["snapshot"] for row in told(other, "pull", "good")] == [second.name]


def test_a_snapshot_is_put_aside_by_hand_and_taken_back(tmp_path: Path) -> None:
    publish(tmp_path, "good")
    assert "is in quarantine" in run(tmp_path, "quarantine", "good", "--reason", "answers slowly")
    assert state_of(tmp_path, "good") == "in quarantine"
    assert "good: failed: answers slowly" in run(tmp_path, "ls")
    assert "may be used again" in run(tmp_path, "quarantine", "good", "--lift")
    assert state_of(tmp_path, "good") == "good"


def test_what_is_removed_is_gone_and_named(tmp_path: Path) -> None:
    first, second = publish(tmp_path, "good"), publish(tmp_path, "good")
    assert f"good: {first.name} removed" in run(tmp_path, "rm", first.name)
    assert [row["snapshot"] for row in told(tmp_path, "ls")] == [second.name]
    assert "nagara snapshot ls" in fails(tmp_path, "rm", first.name)


def test_a_tier_that_is_not_set_is_named_with_those_that_are(tmp_path: Path) -> None:
    publish(tmp_path, "good")
    assert "no tier is set" in fails(tmp_path, "pull", "good")
    far_folder(tmp_path)
    assert "no tier named 'nowhere' (known: zone)" in fails(
        tmp_path, "push", "good", "--to", "nowhere"
    )


def test_one_that_is_not_all_here_says_how_much_is(tmp_path: Path) -> None:
    publish(tmp_path, "good")
    assert told(tmp_path, "ls")[0]["here_bytes"] is None
    (shown,) = json.loads(run(tmp_path, "show", "good"))
    (pages,) = [each for each in shown["objects"] if each["path"] == "memory/pages-1.img"]
    (tmp_path / "store/tenants/default/sha256" / pages["object"]).unlink()
    (row,) = told(tmp_path, "ls")
    assert row["state"] == "partly here"
    assert row["here_bytes"] == shown["stored_bytes"] - 9000


@pytest.mark.parametrize("command", ["ls", "show", "verify", "push", "pull", "rm", "quarantine"])
def test_each_help_has_an_example(command: str, tmp_path: Path) -> None:
    assert f"nagara snapshot {command} " in run(tmp_path, command, "--help").replace("\n", " ")


@pytest.mark.parametrize("command", ["ls", "show"])
def test_each_says_what_it_does(command: str, tmp_path: Path) -> None:
    assert "snapshots" in run(tmp_path, command, "--help")
