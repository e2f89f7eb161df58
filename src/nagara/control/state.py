"""What control remembers: apps and their versions, replicas, starts, captures, keys.

Called from the loop's tasks; every method is one transaction on the writer thread. It decides
nothing. Replicas are recorded before they are started, so that a killed control process finds
what it left behind.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nagara.base.clock import Clock
from nagara.contract.replica import CaptureReport, Lease
from nagara.control.app import App
from nagara.control.app_document import from_document, to_document
from nagara.control.errors import ControlError
from nagara.control.key_limits import NO_LIMITS, KeyLimits, limits_of
from nagara.control.sql import Database, Row, Sql, put

_log = logging.getLogger(__name__)

_ADD_VERSION = """INSERT INTO versions
    (tenant, app, version, definition, document, deployed_s) VALUES (?, ?, ?, ?, ?, ?)"""
_PUT_LIMITS = put("tenant_limits", ("tenant",), ("tenant", "limits"))
_ADD_KEY = """INSERT INTO keys (id, tenant, name, sha256, created_s, limits)
    VALUES (?, ?, ?, ?, ?, ?)"""
_PUT_APP = put("apps", ("tenant", "app"), ("tenant", "app", "version"))
_PUT_REPLICA = put(
    "replicas", ("replica",),
    ("replica", "tenant", "app", "definition", "purpose", "slot", "epoch", "state", "reason",
     "created_s", "changed_s"),
)  # fmt: skip
_PUT_START = put(
    "starts", ("replica",),
    ("replica", "tenant", "app", "kind", "stages", "total_s", "fallback", "snapshot",
     "failed_snapshot", "error", "started_s", "files", "host"),
)  # fmt: skip
_PUT_CAPTURE = put(
    "captures", ("replica",),
    ("replica", "tenant", "app", "definition", "version", "snapshot", "reason", "memory_bytes",
     "layer_bytes", "elapsed_s", "finished_s"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Deployed:
    """An app with the number of its version."""

    app: App
    version: int


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an app."""

    number: int
    app: App
    deployed_s: float


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start's waterfall. `kind` is None for a start that failed; `error` says why."""

    replica: str
    tenant: str
    app: str
    kind: str | None
    stages: Mapping[str, float]  # seconds, with `unaccounted`
    total_s: float
    started_s: float
    fallback: str | None = None
    snapshot: str | None = None
    failed_snapshot: str | None = None  # whose restore was tried before a plain start
    error: str | None = None
    files: Mapping[str, Any] | None = None  # as `FilesReport`
    host: Mapping[str, float] | None = None  # as in `StartReport`


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One finished attempt to make a snapshot."""

    replica: str
    version: int
    report: CaptureReport


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without the key."""

    id: str
    tenant: str
    name: str
    sha256: str
    created_s: float
    limits: KeyLimits = NO_LIMITS


class State:
    """The database's tables as methods."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    # -- apps ------------------------------------------------------------------------------

    async def put_app(self, app: App) -> int:
        """Adds a version of the app and makes it the present one; returns its number."""
        now_s = self._clock.wall_s()
        document = json.dumps(to_document(app), sort_keys=True)

        def act(db: Sql) -> int:
            row = db.execute(
                "SELECT max(version) FROM versions WHERE tenant = ? AND app = ?",
                (app.tenant, app.name),
            ).fetchone()
            version = (row[0] or 0) + 1
            db.execute(
                _ADD_VERSION,
                (app.tenant, app.name, version, app.definition, document, now_s),
            )
            db.execute(_PUT_APP, (app.tenant, app.name, version))
            return version

        return await self._database.run(act)

    async def apps(self) -> list[Deployed]:
        """The present version of every app, oldest app first."""

        def act(db: Sql) -> list[Deployed]:
            rows = db.execute(
                "SELECT version, document FROM apps JOIN versions USING (tenant, app, version)"
                " ORDER BY apps.rowid"
            )
            return [
                Deployed(from_document(json.loads(row["document"])), row["version"]) for row in rows
            ]

        return await self._database.run(act)

    async def versions(self, tenant: str, app: str) -> list[Version]:
        """The app's versions that are kept, newest first."""

        def act(db: Sql) -> list[Version]:
            rows = db.execute(
                "SELECT version, document, deployed_s FROM versions WHERE tenant = ? AND app = ?"
                " ORDER BY version DESC",
                (tenant, app),
            )
            return [
                Version(
                    row["version"], from_document(json.loads(row["document"])), row["deployed_s"]
                )
                for row in rows
            ]

        return await self._database.run(act)

    async def set_version(self, app: App, version: int) -> None:
        """Makes an earlier version the present one."""
        await self._database.run(lambda db: db.execute(_PUT_APP, (app.tenant, app.name, version)))

    async def delete_app(self, tenant: str, app: str) -> None:
        """Removes everything known of the app."""

        def act(db: Sql) -> None:
            for table in ("apps", "versions", "replicas", "starts", "captures"):
                # The names come from the line above, not from a request.
                db.execute(
                    f"DELETE FROM {table} WHERE tenant = ? AND app = ?",  # noqa: S608
                    (tenant, app),
                )

        await self._database.run(act)

    # -- replicas --------------------------------------------------------------------------

    async def add_replica(
        self, replica: str, app: App, lease: Lease, *, state: str, purpose: str
    ) -> None:
        """Records a replica that is about to be started. `purpose` is "serve" or "capture"."""
        now_s = self._clock.wall_s()
        values = (
            replica, app.tenant, app.name, app.definition, purpose,
            lease.slot, lease.epoch, state, None, now_s, now_s,
        )  # fmt: skip
        await self._database.run(lambda db: db.execute(_PUT_REPLICA, values))

    async def set_replica(self, replica: str, state: str, reason: str | None = None) -> None:
        """Records a replica's new state. See `_note`."""
        values = (state, reason, self._clock.wall_s(), replica)
        await self._note(
            lambda db: db.execute(
                "UPDATE replicas SET state = ?, reason = coalesce(?, reason), changed_s = ?"
                " WHERE replica = ?",
                values,
            )
        )

    async def end_lost_replicas(self, kept: frozenset[str]) -> None:
        """Closes the records of replicas that were alive before and are not among `kept`."""
        now_s = self._clock.wall_s()

        def act(db: Sql) -> None:
            rows = db.execute(
                "SELECT replica FROM replicas WHERE state NOT IN ('stopped', 'failed')"
            ).fetchall()
            for row in rows:
                if row["replica"] not in kept:
                    db.execute(
                        "UPDATE replicas SET state = 'failed', changed_s = ?,"
                        " reason = 'not found after control was restarted' WHERE replica = ?",
                        (now_s, row["replica"]),
                    )

        await self._database.run(act)

    async def replicas(self, tenant: str, app: str, limit: int = 20) -> list[dict[str, object]]:
        """The app's latest replicas, newest first, as rows."""

        def act(db: Sql) -> list[dict[str, object]]:
            rows = db.execute(
                "SELECT * FROM replicas WHERE tenant = ? AND app = ?"
                " ORDER BY created_s DESC, rowid DESC LIMIT ?",
                (tenant, app, limit),
            )
            return [dict(row) for row in rows]

        return await self._database.run(act)

    async def app_of(self, replica: str) -> tuple[str, str] | None:
        """(tenant, app) of a replica, also of one that is gone."""

        def act(db: Sql) -> tuple[str, str] | None:
            row = db.execute(
                "SELECT tenant, app FROM replicas WHERE replica = ?", (replica,)
            ).fetchone()
            return (row["tenant"], row["app"]) if row else None

        return await self._database.run(act)

    # -- starts ----------------------------------------------------------------------------

    async def add_start(self, start: StartRecord) -> None:
        """Records one start's waterfall. See `_note`."""
        values = (
            start.replica, start.tenant, start.app, start.kind, json.dumps(dict(start.stages)),
            start.total_s, start.fallback, start.snapshot, start.failed_snapshot, start.error,
            start.started_s, _json(start.files), _json(start.host),
        )  # fmt: skip
        await self._note(lambda db: db.execute(_PUT_START, values))

    async def starts(
        self, tenant: str, app: str, *, replica: str | None = None, limit: int = 50
    ) -> list[StartRecord]:
        """The app's latest starts, newest first; `replica` narrows to one."""

        def act(db: Sql) -> list[StartRecord]:
            rows = db.execute(
                "SELECT * FROM starts"
                " WHERE tenant = ? AND app = ? AND replica = coalesce(?, replica)"
                " ORDER BY started_s DESC, rowid DESC LIMIT ?",
                (tenant, app, replica, limit),
            )
            return [_start_record(row) for row in rows]

        return await self._database.run(act)

    # -- captures --------------------------------------------------------------------------

    async def add_capture(self, app: App, capture: CaptureRecord) -> None:
        """Records a finished capture, successful or not. See `_note`."""
        report = capture.report
        values = (
            capture.replica, app.tenant, app.name, app.definition, capture.version,
            report.snapshot, report.reason, report.memory_bytes, report.layer_bytes,
            report.elapsed_s, self._clock.wall_s(),
        )  # fmt: skip
        await self._note(lambda db: db.execute(_PUT_CAPTURE, values))

    async def captures(self, tenant: str, app: str, definition: str) -> list[CaptureRecord]:
        """The captures of this definition, newest first."""

        def act(db: Sql) -> list[CaptureRecord]:
            rows = db.execute(
                "SELECT * FROM captures WHERE tenant = ? AND app = ? AND definition = ?"
                " ORDER BY finished_s DESC, rowid DESC LIMIT 20",
                (tenant, app, definition),
            )
            return [_capture(row) for row in rows]

        return await self._database.run(act)

    async def _note(self, action: Callable[[Sql], object]) -> None:
        """Writes down what has already happened.

        A full disk loses the note, never the course of a replica's life: what really runs is
        known from the node.
        """
        try:
            await self._database.run(action)
        except ControlError as error:
            _log.warning("not recorded: %s", error)

    # -- keys ------------------------------------------------------------------------------

    async def add_key(self, key: KeyRecord) -> None:
        """Records an API key by its hash."""
        limits = json.dumps(key.limits.document())
        values = (key.id, key.tenant, key.name, key.sha256, key.created_s, limits)
        await self._database.run(lambda db: db.execute(_ADD_KEY, values))

    async def keys(self) -> list[KeyRecord]:
        """All API keys, oldest first."""

        def act(db: Sql) -> list[KeyRecord]:
            return [
                KeyRecord(**{**dict(row), "limits": limits_of(json.loads(row["limits"]))})
                for row in db.execute("SELECT * FROM keys ORDER BY rowid")
            ]

        return await self._database.run(act)

    async def tenant_limits(self) -> dict[str, KeyLimits]:
        """The bounds of tenants that have any."""

        def act(db: Sql) -> dict[str, KeyLimits]:
            rows = db.execute("SELECT tenant, limits FROM tenant_limits")
            return {row["tenant"]: limits_of(json.loads(row["limits"])) for row in rows}

        return await self._database.run(act)

    async def set_tenant_limits(self, tenant: str, limits: KeyLimits) -> None:
        """Records a tenant's bounds."""
        values = (tenant, json.dumps(limits.document()))
        await self._database.run(lambda db: db.execute(_PUT_LIMITS, values))

    async def delete_key(self, id_: str) -> bool:
        """Whether there was such a key."""
        return await self._database.run(
            lambda db: db.execute("DELETE FROM keys WHERE id = ?", (id_,)).rowcount > 0
        )


def _start_record(row: Row) -> StartRecord:
    columns = ("stages", "files", "host")
    documents = {name: json.loads(row[name] or "null") for name in columns}
    return StartRecord(**{**dict(row), **documents})


def _json(document: Mapping[str, Any] | None) -> str | None:
    return None if document is None else json.dumps(dict(document))


def _capture(row: Row) -> CaptureRecord:
    report = CaptureReport(
        snapshot=row["snapshot"],
        reason=row["reason"],
        memory_bytes=row["memory_bytes"],
        layer_bytes=row["layer_bytes"],
        elapsed_s=row["elapsed_s"],
    )
    return CaptureRecord(replica=row["replica"], version=row["version"], report=report)
