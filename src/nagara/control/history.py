"""What was recorded, for people who watch: starts, replicas and captures, newest first.

Reads only. Called from the loop; each method is one look into the database.
"""

import json
from collections import defaultdict
from typing import Any

from nagara.control.sql import Database, Row, Sql

PAGE_ROWS = 100
MAX_ROWS = 1000

_OF_PRESENT = (
    " captures.definition = versions.definition AS is_present"
    " FROM captures JOIN apps ON apps.tenant = captures.tenant AND apps.app = captures.app"
    " JOIN versions ON versions.tenant = apps.tenant AND versions.app = apps.app"
    " AND versions.version = apps.version"
)
_CAPTURES = (
    "SELECT captures.app, replica, captures.version, snapshot, reason, memory_bytes, layer_bytes,"
    " elapsed_s, finished_s," + _OF_PRESENT
)
_MADE = (
    "SELECT captures.tenant, captures.app, snapshot,"
    + _OF_PRESENT
    + " WHERE snapshot IS NOT NULL ORDER BY finished_s"
)
_RESTORES = (
    "SELECT tenant, app, snapshot, count(*) AS count, avg(total_s) AS mean_s FROM starts"
    " WHERE snapshot IS NOT NULL GROUP BY tenant, app, snapshot"
)
_FAILED_RESTORES = (
    "SELECT tenant, app, failed_snapshot AS snapshot, count(*) AS count FROM starts"
    " WHERE failed_snapshot IS NOT NULL GROUP BY tenant, app, failed_snapshot"
)
_OF_APP = " WHERE captures.app = ?"
_NEWEST = " ORDER BY finished_s DESC, captures.rowid DESC LIMIT ?"

# What is told of a snapshot of which no start and no capture is recorded.
UNUSED: dict[str, Any] = {
    "restores": 0, "failed_restores": 0, "restored_s": None, "is_present": None,
}  # fmt: skip


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

    async def snapshot_uses(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """By tenant, app and snapshot: its restores among the recorded starts, how long they took
        in the mean, and how many failed; whether it is of the app's present definition, where
        that is known."""

        def act(db: Sql) -> dict[tuple[str, str, str], dict[str, Any]]:
            uses: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(UNUSED.copy)
            for row in db.execute(_RESTORES):
                uses[_key(row)] |= {"restores": row["count"], "restored_s": row["mean_s"]}
            for row in db.execute(_FAILED_RESTORES):
                uses[_key(row)]["failed_restores"] = row["count"]
            for row in db.execute(_MADE):
                uses[_key(row)]["is_present"] = bool(row["is_present"])
            return dict(uses)

        return await self._database.run(act)


def _key(row: Row) -> tuple[str, str, str]:
    return row["tenant"], row["app"], row["snapshot"]


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
