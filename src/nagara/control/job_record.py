"""Queued requests and their answers as a table of control's state."""

import json
from dataclasses import dataclass
from typing import Any

from nagara.base.clock import Clock
from nagara.control.sql import Database, Sql, put

_COLUMNS = (
    "id", "app", "owner", "state", "method", "path", "headers", "body", "created_s",
    "callback",
)  # fmt: skip
_PUT = put("jobs", ("id",), _COLUMNS)


@dataclass(frozen=True, slots=True)
class Job:
    """One queued request. `owner` is the hash of the key that queued it, "" without keys."""

    id: str
    app: str
    owner: str
    state: str  # queued, running, done or failed
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    created_s: float
    callback: str | None = None  # the address that wants to be told
    status: int | None = None  # of the answer
    answer_headers: str | None = None  # JSON
    answer: bytes | None = None
    reason: str | None = None  # why there is none


class JobRecord:
    """The table."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def add(self, job: Job) -> None:
        """Writes a new one down."""
        values = (
            *(job.id, job.app, job.owner, job.state, job.method, job.path),
            *(json.dumps(job.headers), job.body, job.created_s, job.callback),
        )
        await self._database.run(lambda db: db.execute(_PUT, values))

    async def set_running(self, id_: str) -> None:
        """It is about to be sent."""
        await self._database.run(
            lambda db: db.execute("UPDATE jobs SET state = 'running' WHERE id = ?", (id_,))
        )

    async def end(
        self,
        id_: str,
        state: str,
        *,
        status: int | None = None,
        headers: str | None = None,
        answer: bytes | None = None,
        reason: str | None = None,
    ) -> None:
        """It has its answer, or will have none. What was asked is forgotten; whoever wanted to be
        called back is still to be told."""
        values = (state, status, headers, answer, reason, self._clock.wall_s(), b"", id_)
        await self._database.run(
            lambda db: db.execute(
                "UPDATE jobs SET state = ?, status = ?, answer_headers = ?, answer = ?,"
                " reason = ?, ended_s = ?, body = ?, callback_state = 'due' WHERE id = ?",
                values,
            )
        )

    async def find(self, id_: str) -> Job | None:
        """One of them."""

        def act(db: Sql) -> Job | None:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (id_,)).fetchone()
            return None if row is None else _job(row)

        return await self._database.run(act)

    async def unended(self) -> list[Job]:
        """Those that have no answer yet, oldest first."""

        def act(db: Sql) -> list[Job]:
            rows = db.execute(
                "SELECT * FROM jobs WHERE state IN ('queued', 'running') ORDER BY created_s, rowid"
            )
            return [_job(row) for row in rows]

        return await self._database.run(act)

    async def untold(self) -> list[str]:
        """Those that have ended and whose callback is still to be made, oldest first."""

        def act(db: Sql) -> list[str]:
            rows = db.execute(
                "SELECT id FROM jobs WHERE callback IS NOT NULL AND callback_state = 'due'"
                " ORDER BY ended_s"
            )
            return [str(row["id"]) for row in rows]

        return await self._database.run(act)

    async def told(self, id_: str, how: str) -> None:
        """Its callback was made, or is given up."""
        await self._database.run(
            lambda db: db.execute("UPDATE jobs SET callback_state = ? WHERE id = ?", (how, id_))
        )

    async def drop(self, id_: str) -> None:
        """Forgets one."""
        await self._database.run(lambda db: db.execute("DELETE FROM jobs WHERE id = ?", (id_,)))


def forget_old_jobs(db: Sql, before_s: float) -> None:
    """Removes answers that were there before a time."""
    db.execute("DELETE FROM jobs WHERE ended_s < ?", (before_s,))


def _job(row: Any) -> Job:
    return Job(
        id=row["id"],
        app=row["app"],
        owner=row["owner"],
        state=row["state"],
        method=row["method"],
        path=row["path"],
        headers=tuple((name, value) for name, value in json.loads(row["headers"])),
        body=bytes(row["body"]),
        created_s=row["created_s"],
        callback=row["callback"],
        status=row["status"],
        answer_headers=row["answer_headers"],
        answer=None if row["answer"] is None else bytes(row["answer"]),
        reason=row["reason"],
    )
