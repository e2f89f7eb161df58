"""The number of this process's time as the holder of its database, which all its orders carry.

One row of the database: its name, drawn at the first opening, and the last number given. Numbers
go on from seconds since 1970, so that also a database that was put back from a backup gives
larger ones than it had given after that.
"""

import secrets

from nagara.contract.control_epoch import ControlEpoch
from nagara.control.sql import Sql, put

_PUT = put("control_epochs", ("id",), ("id", "database", "number"))


def begin_epoch(sql: Sql, wall_s: float) -> ControlEpoch:
    """The next holder's. Within a transaction that only the holder can make."""
    row = sql.execute("SELECT database, number FROM control_epochs WHERE id = 1").fetchone()
    database, last = (row["database"], row["number"]) if row else (secrets.token_hex(8), 0)
    epoch = ControlEpoch(database, max(last + 1, int(wall_s)))
    sql.execute(_PUT, (1, epoch.database, epoch.number))
    return epoch
