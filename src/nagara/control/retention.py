"""What the state forgets, so that it does not grow for ever.

Kept are the latest versions of each app, among them the present one, the latest starts and
captures, replicas that live and the latest of those that have ended, and results of queued
requests until their time is over. Runs once an hour, and at the beginning; one task on the loop.
"""

import logging
from functools import partial

from nagara.base.clock import Clock
from nagara.control.errors import ControlError
from nagara.control.job_record import forget_old_jobs
from nagara.control.jobs import KEPT_S
from nagara.control.sql import Database, Sql

EVERY_S = 3600.0
VERSIONS = 20
STARTS = 500
REPLICAS = 500
CAPTURES = 100

_log = logging.getLogger(__name__)

# Each leaves the newest rows of every app. The names are written here, not taken from a request.
_OLD_VERSIONS = """DELETE FROM versions WHERE version <= (
        SELECT max(newer.version) FROM versions newer
        WHERE newer.tenant = versions.tenant AND newer.app = versions.app) - ?
    AND NOT EXISTS (SELECT 1 FROM apps WHERE apps.tenant = versions.tenant
        AND apps.app = versions.app AND apps.version = versions.version)"""
_APPS = "SELECT DISTINCT tenant, app FROM {table}"
_OLD = """DELETE FROM {table} WHERE tenant = ? AND app = ? AND {over} AND {at} < (
        SELECT min(kept.at) FROM (SELECT {at} AS at FROM {table}
            WHERE tenant = ? AND app = ? AND {over} ORDER BY {at} DESC LIMIT ?) kept)"""
_TABLES = (
    ("starts", "started_s", "1 = 1", STARTS),
    ("captures", "finished_s", "1 = 1", CAPTURES),
    ("replicas", "created_s", "state IN ('stopped', 'failed')", REPLICAS),
)


class Retention:
    """The loop that forgets."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._database.run(forget)
                before_s = self._clock.wall_s() - KEPT_S
                await self._database.run(partial(forget_old_jobs, before_s=before_s))
            except ControlError as error:  # it is tried again
                _log.warning("old history was not removed: %s", error)
            await self._clock.sleep(EVERY_S)


def forget(db: Sql) -> None:
    """Removes what is no longer kept, in one transaction."""
    db.execute(_OLD_VERSIONS, (VERSIONS,))
    for table, at, over, kept in _TABLES:
        names = {"table": table, "at": at, "over": over}
        for tenant, app in [
            (row["tenant"], row["app"]) for row in db.execute(_APPS.format(**names)).fetchall()
        ]:
            db.execute(_OLD.format(**names), (tenant, app, tenant, app, kept))
