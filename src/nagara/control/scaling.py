"""Once a second: asks the autoscaler about every app and has the fleet carry out its answer.

The thin loop around the pure decision. It also forgets old failures of an app whose replicas
have proven that it can run, and lets captures begin.
"""

import logging
import time
from datetime import datetime

from nagara.base.clock import Clock
from nagara.control.autoscaler import Decision, decide
from nagara.control.cron import scheduled
from nagara.control.fleet import Fleet
from nagara.control.metrics import Histogram
from nagara.control.replicas import ReplicaState
from nagara.control.service import Service

TICK_S = 1.0

_log = logging.getLogger(__name__)


class Scaling:
    """The loop. One task; `tick` does not wait for anything.

    Args:
        decided_s: how long each round took.
    """

    def __init__(self, fleet: Fleet, clock: Clock, decided_s: Histogram) -> None:
        self._fleet = fleet
        self._decided_s = decided_s
        self._clock = clock

    async def run(self) -> None:
        """Ticks for ever."""
        while True:
            await self._clock.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """One round over all apps."""
        now_s, begun_s = self._clock.monotonic_s(), time.perf_counter()
        at = datetime.fromtimestamp(self._clock.wall_s())  # noqa: DTZ006 - people's own hours
        for service in list(self._fleet.services.values()):
            if service.app.schedule or service.warm:
                service.warm = scheduled(service.app.schedule, at)
            if not service.is_asleep:
                self._scale(service, now_s)
        # A free slot may have been kept for an app that has not come back for it.
        self._fleet.hand_on()
        self._fleet.captures.tick()
        self._decided_s.add(seconds=time.perf_counter() - begun_s)

    def _scale(self, service: Service, now_s: float) -> None:
        if service.has_proven(now_s):
            service.failures.count = 0
        decision, service.memory = decide(
            now_s, service.rules(), service.memory, service.demand(now_s), service.views(now_s)
        )
        for _ in range(_starts_allowed(service, decision, now_s)):
            self._fleet.start(service)
        self._fleet.roll(service)
        for name in decision.cancel:
            self._fleet.cancel(service, name)
        for name in decision.drain:
            self._fleet.drain(service, name)
        if decision.start or decision.cancel or decision.drain:
            _log.debug("%s: %s", service.app.name, decision)


def _starts_allowed(service: Service, decision: Decision, now_s: float) -> int:
    """While an app's starts fail, one at a time and not before the pause is over."""
    if not service.failures.count:
        return decision.start
    if service.failures.left_s(now_s) > 0 or service.count(ReplicaState.STARTING):
        return 0
    return min(1, decision.start)
