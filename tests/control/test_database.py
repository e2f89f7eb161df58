"""The thin layer over SQLite."""

import sqlite3
from pathlib import Path

import pytest

from nagara.control.migrations import MIGRATIONS
from nagara.control.sqlite_database import CHECKPOINT_COMMITS, SqliteDatabase


async def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path)
    await database.open()

    def act(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO apps VALUES ('t', 'a', 1)")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await database.run(act)
    count = await database.run(lambda db: db.execute("SELECT count(*) FROM apps").fetchone()[0])
    assert count == 0
    await database.close()


async def test_the_log_is_moved_into_the_database_beside_the_writing(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path)
    await database.open()
    for number in range(3 * CHECKPOINT_COMMITS):
        values = ("t", str(number), 1)
        await database.run(lambda db, v=values: db.execute("INSERT INTO apps VALUES (?, ?, ?)", v))
    await database.close()
    connection = sqlite3.connect(tmp_path / "control.db")
    (count,) = connection.execute("SELECT count(*) FROM apps").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    assert (count, version) == (3 * CHECKPOINT_COMMITS, len(MIGRATIONS))


async def test_a_folder_can_be_opened_again_after_closing(tmp_path: Path) -> None:
    for _ in range(2):
        database = SqliteDatabase(tmp_path / "deep" / "state")
        await database.open()
        await database.close()
