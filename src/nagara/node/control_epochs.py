"""Whose orders this machine takes: of each control database those of its newest holder.

    a call's epoch, beside the newest seen of its database
        newer   becomes the newest; calls under an older one that are still going on are cancelled
        same    is answered
        older   is refused: its control process was deposed, and may not even know it
        none    looks are answered; orders only for as long as no epoch was ever seen here

A database that was never seen before begins with whatever number it has: that of another one says
nothing about it. Two that use one machine at once are kept apart by their leases' names alone.

A dialled replica's bytes are no call: a deposed gateway may finish what it has in hand with a
replica for as long as that is there, but dials no other.

The newest numbers are kept in a file, so that an agent that was started again still refuses.
"""

import asyncio
import json
import logging
from pathlib import Path

from nagara.base.durable import write_durably
from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError
from nagara.node.wire import LOOKS

FILE_NAME = "control-epochs.json"
MOST_DATABASES = 64  # that have called last

_NOBODY = ""  # the "database" of orders without an epoch

_log = logging.getLogger(__name__)


class ControlEpochs:
    """One machine's memory. Belongs to one event loop.

    Args:
        file: where it is kept; None: it ends with this object.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._newest: dict[str, int] = {} if file is None else _read(file)
        self._deposed: dict[str, asyncio.Future[None]] = {}  # by database
        self._raising = asyncio.Lock()

    async def admit(self, epoch: ControlEpoch | None, method: str) -> asyncio.Future[None]:
        """Lets a call through. What it returns is done when the call has to end after all.

        Raises:
            DeposedError: a newer control process gives the orders.
        """
        if epoch is None:
            return self._without_epoch(method)
        if self._is_newest(epoch):
            async with self._raising:
                if self._is_newest(epoch):
                    await self._obey(epoch)
        if epoch.number < (newest := self._newest[epoch.database]):
            raise DeposedError(
                "a newer control process of the same database gives the orders here:"
                f" its epoch is {newest}, this one's {epoch.number}",
                hint="nothing, if another one has taken over; after the database was put back to"
                f" an earlier state, remove node/{FILE_NAME} in the agent's state folder and start"
                " it anew",
            )
        return self._end_of(epoch.database)

    def _without_epoch(self, method: str) -> asyncio.Future[None]:
        if method in LOOKS:
            return asyncio.get_running_loop().create_future()
        if self._newest:
            raise DeposedError(
                "orders are taken from a control process with an epoch only",
                hint="use the same version of nagara on all machines",
            )
        return self._end_of(_NOBODY)

    def _is_newest(self, epoch: ControlEpoch) -> bool:
        return epoch.number > self._newest.get(epoch.database, -1)

    def _end_of(self, database: str) -> asyncio.Future[None]:
        if database not in self._deposed:
            self._deposed[database] = asyncio.get_running_loop().create_future()
        return self._deposed[database]

    async def _obey(self, epoch: ControlEpoch) -> None:
        """From now on nobody older. It is on the disk before anything is done under it."""
        newest = {name: number for name, number in self._newest.items() if name != epoch.database}
        newest[epoch.database] = epoch.number
        for name in list(newest)[:-MOST_DATABASES]:
            del newest[name]
        await asyncio.to_thread(self._save, newest)
        self._newest = newest
        _log.info("orders come under epoch %d of database %s now", epoch.number, epoch.database)
        for name in (epoch.database, _NOBODY):
            if (deposed := self._deposed.pop(name, None)) is not None:
                deposed.set_result(None)

    def _save(self, newest: dict[str, int]) -> None:
        if self._file is None:
            return
        try:
            write_durably(self._file, json.dumps(newest).encode())
        except OSError as error:  # a full disk: this process still knows it
            _log.error("the newest epochs of control are not recorded: %s", error)


def _read(file: Path) -> dict[str, int]:
    try:
        return {str(name): int(number) for name, number in json.loads(file.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        _log.error("%s: epochs of control seen before are forgotten: %s", file, error)
        return {}
