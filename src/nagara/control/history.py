"""What was recorded, for people who watch: starts, replicas and captures, newest first.

Reads only. Called from the loop; each method is one look into the database.
"""

import json
import sqlite3
from typing import Any

from nagara.control.database import Database

PAGE_ROWS = 100
MAX_ROWS = 1000


class History:
    """The tables of `state`, as documents."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def starts(
        self, *, app: str | None = None, before: int | None = None, limit: int = PAGE_ROWS
    ) -> list[dict[str, Any]]:
        """Starts that ended, the latest first; `before` is the `id` to go on from."""

        def act(db: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = db.execute(
                "SELECT rowid AS id, * FROM starts"
                " WHERE (? IS NULL OR app = ?) AND (? IS NULL OR rowid < ?)"
                " ORDER BY rowid DESC LIMIT ?",
                (app, app, before, before, limit),
            )
            return [_start(row) for row in rows]

        return await self._database.run(act)

    async def starts_after(self, id_: int) -> list[dict[str, Any]]:
        """Starts recorded since the one with that `id`, the oldest first.

        Numbers are given again after an app and its starts were deleted: then it is the latest.
        """

        def act(db: sqlite3.Connection) -> list[dict[str, Any]]:
            last = db.execute("SELECT max(rowid) FROM starts").fetchone()[0] or 0
            rows = db.execute(
                "SELECT rowid AS id, * FROM starts WHERE rowid > ? ORDER BY rowid LIMIT ?",
                (id_ if id_ <= last else last - PAGE_ROWS, MAX_ROWS),
            )
            return [_start(row) for row in rows]

        return await self._database.run(act)

    async def replicas(self, app: str, limit: int = PAGE_ROWS) -> list[dict[str, Any]]:
        """The app's replicas, living and ended."""

        def act(db: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = db.execute(
                "SELECT replica, app, purpose, slot, epoch, state, reason, created_s, changed_s"
                " FROM replicas WHERE app = ? ORDER BY created_s DESC, rowid DESC LIMIT ?",
                (app, limit),
            )
            return [dict(row) for row in rows]

        return await self._database.run(act)

    async def captures(self, app: str | None = None) -> list[dict[str, Any]]:
        """Attempts to make snapshots; `is_present` for those of the app's present definition."""

        def act(db: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = db.execute(
                "SELECT captures.app, replica, captures.version, snapshot, reason, memory_bytes,"
                " layer_bytes, elapsed_s, finished_s,"
                " captures.definition = versions.definition AS is_present"
                " FROM captures JOIN apps ON apps.tenant = captures.tenant"
                " AND apps.app = captures.app"
                " JOIN versions ON versions.tenant = apps.tenant AND versions.app = apps.app"
                " AND versions.version = apps.version"
                " WHERE (? IS NULL OR captures.app = ?)"
                " ORDER BY finished_s DESC, captures.rowid DESC LIMIT ?",
                (app, app, MAX_ROWS),
            )
            return [{**dict(row), "is_present": bool(row["is_present"])} for row in rows]

        return await self._database.run(act)


def _start(row: sqlite3.Row) -> dict[str, Any]:
    """A row with what is kept as JSON read."""
    read = {key: row[key] and json.loads(row[key]) for key in ("stages", "files", "host")}
    return {**dict(row), **read}
