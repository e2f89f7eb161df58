"""What was recorded, for people who watch: starts, replicas and captures, newest first.

Reads only. Called from the loop; each method is one look into the database.
"""

import json
from typing import Any

from nagara.control.sql import Database, Row, Sql

PAGE_ROWS = 100
MAX_ROWS = 1000

_CAPTURES = (
    "SELECT captures.app, replica, captures.version, snapshot, reason, memory_bytes, layer_bytes,"
    " elapsed_s, finished_s, captures.definition = versions.definition AS is_present"
    " FROM captures JOIN apps ON apps.tenant = captures.tenant AND apps.app = captures.app"
    " JOIN versions ON versions.tenant = apps.tenant AND versions.app = apps.app"
    " AND versions.version = apps.version"
)
_OF_APP = " WHERE captures.app = ?"
_NEWEST = " ORDER BY finished_s DESC, captures.rowid DESC LIMIT ?"


class History:
    """The tables of `state`, as documents."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def starts(
        self, *, app: str | None = None, before: int | None = None, limit: int = PAGE_ROWS
    ) -> list[dict[str, Any]]:
        """Starts that ended, the latest first; `before` is the `id` to go on from."""

        def act(db: Sql) -> list[dict[str, Any]]:
            wanted, values = _where(app=app, before=before)
            rows = db.execute(
                # Made of the names below, not of a request.
                f"SELECT rowid AS id, * FROM starts{wanted} ORDER BY rowid DESC LIMIT ?",  # noqa: S608
                (*values, limit),
            )
            return [_start(row) for row in rows]

        return await self._database.run(act)

    async def starts_after(self, id_: int) -> list[dict[str, Any]]:
        """Starts recorded since the one with that `id`, the oldest first.

        Numbers are given again after an app and its starts were deleted: then it is the latest.
        """

        def act(db: Sql) -> list[dict[str, Any]]:
            last = db.execute("SELECT max(rowid) FROM starts").fetchone()[0] or 0
            rows = db.execute(
                "SELECT rowid AS id, * FROM starts WHERE rowid > ? ORDER BY rowid LIMIT ?",
                (id_ if id_ <= last else last - PAGE_ROWS, MAX_ROWS),
            )
            return [_start(row) for row in rows]

        return await self._database.run(act)

    async def replicas(self, app: str, limit: int = PAGE_ROWS) -> list[dict[str, Any]]:
        """The app's replicas, living and ended."""

        def act(db: Sql) -> list[dict[str, Any]]:
            rows = db.execute(
                "SELECT replica, app, purpose, slot, epoch, state, reason, created_s, changed_s"
                " FROM replicas WHERE app = ? ORDER BY created_s DESC, rowid DESC LIMIT ?",
                (app, limit),
            )
            return [dict(row) for row in rows]

        return await self._database.run(act)

    async def captures(self, app: str | None = None) -> list[dict[str, Any]]:
        """Attempts to make snapshots; `is_present` for those of the app's present definition."""

        def act(db: Sql) -> list[dict[str, Any]]:
            rows = db.execute(
                _CAPTURES + ("" if app is None else _OF_APP) + _NEWEST,
                (MAX_ROWS,) if app is None else (app, MAX_ROWS),
            )
            return [{**dict(row), "is_present": bool(row["is_present"])} for row in rows]

        return await self._database.run(act)


def _where(*, app: str | None = None, before: int | None = None) -> tuple[str, tuple[Any, ...]]:
    """The condition of what is asked for, and its values."""
    given = [("app = ?", app), ("rowid < ?", before)]
    parts = [text for text, value in given if value is not None]
    values = tuple(value for _, value in given if value is not None)
    return (f" WHERE {' AND '.join(parts)}" if parts else ""), values


def _start(row: Row) -> dict[str, Any]:
    """A row with what is kept as JSON read."""
    read = {key: row[key] and json.loads(row[key]) for key in ("stages", "files", "host")}
    return {**{key: row[key] for key in row.keys() if key != "seq"}, **read}  # noqa: SIM118
