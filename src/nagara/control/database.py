"""Which database the state is in: SQLite in the state folder, or PostgreSQL by its address."""

from pathlib import Path

from nagara.base.errors import UsageError
from nagara.control.postgres_database import PostgresDatabase
from nagara.control.sql import Database
from nagara.control.sqlite_database import SqliteDatabase


def database_for(folder: Path, url: str | None) -> Database:
    """The state's database, not opened yet.

    Args:
        folder: the state folder; it has the SQLite file, and the tokens in both cases.
        url: `postgresql://...`, or None for SQLite.

    Raises:
        StateBusyError: another process uses the folder.
        UsageError: the address is of no database that nagara knows.
    """
    if url is None:
        return SqliteDatabase(folder)
    if not url.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            "the state is kept in SQLite or PostgreSQL", where="--database",
            hint="leave it out, or write postgresql://USER@HOST/NAME",
        )  # fmt: skip
    return PostgresDatabase(folder, url)
