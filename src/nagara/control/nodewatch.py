"""Keeps control's picture of the replicas equal to the node's.

Three ways to the same end: what the node reports as it happens, a comparison every 30 s for what
a report missed, and one at the beginning that takes over what an earlier control process left.
Runs as tasks on the loop; all changes go through the fleet.
"""

import contextlib
import logging

from nagara.base.clock import Clock
from nagara.base.errors import NagaraError
from nagara.contract.node import Node
from nagara.contract.replica import ReplicaStatus
from nagara.control.fleet import Fleet
from nagara.control.state import State

RECONCILE_S = 30.0
RETRY_S = 2.0
USAGE_S = 5.0

_log = logging.getLogger(__name__)


class NodeWatch:
    """The listener on one node."""

    def __init__(self, node: Node, fleet: Fleet, state: State, clock: Clock) -> None:
        self._node = node
        self._fleet = fleet
        self._state = state
        self._clock = clock

    async def take_over(self) -> None:
        """Routes the replicas an earlier control process left; ends those that do not fit."""
        kept = set()
        for status in await self._node.replicas():
            if self._fleet.adopt(status):
                _log.info("%s: taken over", status.replica)
                kept.add(status.replica)
            else:
                try:
                    await self._node.stop(status.replica)
                except NagaraError as error:  # a later comparison tries again
                    _log.warning("%s: cannot be stopped yet: %s", status.replica, error.what)
        await self._state.end_lost_replicas(frozenset(kept))

    async def listen(self) -> None:
        """Hears of replicas that end, for ever."""
        while True:
            try:
                async for status in self._node.exits():
                    self._fleet.ended(status.replica, status.exit_code, _reason(status))
            except NagaraError as error:
                _log.warning("the node cannot be reached: %s", error.what)
            await self._clock.sleep(RETRY_S)
            await self.compare()

    async def compare_for_ever(self) -> None:
        """Compares every `RECONCILE_S` seconds."""
        while True:
            await self._clock.sleep(RECONCILE_S)
            await self.compare()

    async def measure_for_ever(self) -> None:
        """Asks every `USAGE_S` seconds what replicas use."""
        while True:
            await self._clock.sleep(USAGE_S)
            if self._fleet.ready_replicas():
                with contextlib.suppress(NagaraError):  # whoever compares says it
                    usages = await self._node.usage()
                    self._fleet.strain.take(usages, self._clock.monotonic_s())

    async def compare(self) -> None:
        """Finds replicas that ended unseen, and ends those that nobody knows."""
        # Taken before the node is asked: a replica that becomes ready meanwhile is not missing.
        expected = self._fleet.ready_replicas()
        try:
            present = {status.replica: status for status in await self._node.replicas()}
        except NagaraError as error:
            _log.warning("the node cannot be reached: %s", error.what)
            return
        for name in expected:
            status = present.get(name)
            if status is None or status.exit_code is not None:
                code = None if status is None else status.exit_code
                self._fleet.ended(name, code, _reason(status))
        for name in present:
            if not self._fleet.knows(name):
                _log.warning("%s: not ours; ending it", name)
                self._fleet.stop_unknown(name)


def _reason(status: ReplicaStatus | None) -> str | None:
    """Why the node has ended it, if it was the node."""
    return None if status is None else status.detail.get("reason")
