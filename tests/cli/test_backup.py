"""Saving the state while it is in use, and bringing it back."""

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nagara.cli.main import main
from nagara.control.appfile import parse_apps
from nagara.control.sqlite_database import SqliteDatabase
from nagara.control.state import State
from nagara.testing.clock import JumpingClock

APP = '[app.a]\nimage = "host"\ncommand = ["x"]\n'


def run(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--state", str(state), "backup", *arguments])


async def _apps(state: Path) -> list[str]:
    database = SqliteDatabase(state)
    await database.open()
    found = await State(database, JumpingClock()).apps()
    await database.close()
    return [one.app.name for one in found]


def test_a_state_in_use_is_saved_and_comes_back_somewhere_else(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "backup.tar.gz"

    async def use_and_save() -> Result:
        database = SqliteDatabase(state)
        await database.open()
        await State(database, JumpingClock()).put_app(parse_apps(APP, "f")[0])
        (state / "admin.token").write_text("nga-1")
        (state / "secrets/default").mkdir(parents=True)
        (state / "secrets/default/TOKEN").write_text("hush")
        result = await asyncio.to_thread(run, state, "save", str(file))
        await database.close()
        return result

    assert asyncio.run(use_and_save()).exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    assert run(other, "restore", str(file)).exit_code == 0
    assert asyncio.run(_apps(other)) == ["a"]
    assert (other / "admin.token").read_text() == "nga-1"
    assert (other / "secrets/default/TOKEN").read_text() == "hush"
    again = run(other, "restore", str(file))
    assert again.exit_code == 2
    assert "a state already" in again.stderr
    assert list(tmp_path.glob(".backup*")) == []


def test_where_no_state_is_nothing_is_saved(tmp_path: Path) -> None:
    result = run(tmp_path, "save", str(tmp_path / "b.tar.gz"))
    assert result.exit_code == 2
    assert not (tmp_path / "b.tar.gz").exists()


@pytest.mark.parametrize("name", ["../evil", "node/x", "/etc/x", "control.db.link"])
def test_a_file_that_holds_other_things_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "b.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for member in ("control.db", name):
            archive.addfile(tarfile.TarInfo(member), io.BytesIO())
    state = tmp_path / "state"
    result = run(state, "restore", str(file))
    assert result.exit_code == 2
    assert not (state / "control.db").exists()


def test_what_is_no_backup_is_said(tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    file.write_bytes(b"nonsense")
    result = run(tmp_path / "state", "restore", str(file))
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr
