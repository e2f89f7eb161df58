"""How many requests an app had in the system, averaged over the last seconds.

Demand is one number that changes in one step: a request enters when it arrives and leaves when
its answer ends. Whether it is held or running in between changes nothing, so it can never be
counted twice. Called from the gateway's tasks only.
"""

from collections import deque

from nagara.control.autoscaler import Demand

LONG_S = 60.0
SHORT_S = 2.0
LEAST_PAUSE_S = 1.0  # shorter ones say nothing about keeping a replica
_PAUSES = 100
_RESOLUTION_S = 0.1  # samples closer than this are merged: 1,200 of them cover the long window


class DemandWindow:
    """The integral of demand over time, sampled.

    Args:
        now_s: monotonic seconds; before it demand was zero.
    """

    def __init__(self, now_s: float) -> None:
        self._demand = 0
        self._changed_s = now_s
        self._area = 0.0  # request seconds up to _changed_s
        self._samples: deque[tuple[float, float]] = deque([(now_s, 0.0)])  # (time, area)
        self._idle_since_s = now_s
        self._has_served = False
        self.pauses_s: tuple[float, ...] = ()  # between an answer and the next request, the latest

    @property
    def now(self) -> int:
        """Requests in the system at present, held or running."""
        return self._demand

    def enter(self, now_s: float) -> None:
        """A request has arrived."""
        self._advance(now_s)
        pause_s = self.idle_s(now_s)
        if self._has_served and pause_s >= LEAST_PAUSE_S:
            self.pauses_s = (*self.pauses_s[1 - _PAUSES :], pause_s)
        self._has_served = True
        self._demand += 1

    def leave(self, now_s: float) -> None:
        """A request has ended, whatever its answer."""
        assert self._demand > 0, "more requests left than entered"
        self._advance(now_s)
        self._demand -= 1
        if self._demand == 0:
            self._idle_since_s = now_s

    def mean(self, window_s: float, now_s: float) -> float:
        """Mean demand over the last `window_s` seconds (at most `LONG_S`)."""
        self._advance(now_s)
        begin_s = now_s - window_s
        return max(0.0, (self._area - self._area_at(begin_s)) / window_s)

    def idle_s(self, now_s: float) -> float:
        """Seconds since the last request ended; zero while there is one."""
        return 0.0 if self._demand else max(0.0, now_s - self._idle_since_s)

    def measured(self, held: int, now_s: float) -> Demand:
        """What the autoscaler must know, with `held` of the requests waiting for a replica."""
        return Demand(
            now=self._demand,
            held=held,
            mean60=self.mean(LONG_S, now_s),
            mean2=self.mean(SHORT_S, now_s),
            idle_s=self.idle_s(now_s),
        )

    def forget(self, now_s: float) -> None:
        """What was before counts no more, as if demand had been zero; the present one stays."""
        self._changed_s, self._area = now_s, 0.0
        self._samples = deque([(now_s, 0.0)])

    def _advance(self, now_s: float) -> None:
        if now_s - self._changed_s >= _RESOLUTION_S and self._samples[-1][0] < self._changed_s:
            # Merged changes end here: what follows is straight and must not be mixed with them.
            self._samples.append((self._changed_s, self._area))
        self._area += self._demand * max(0.0, now_s - self._changed_s)
        self._changed_s = max(self._changed_s, now_s)
        if now_s - self._samples[-1][0] >= _RESOLUTION_S:
            self._samples.append((now_s, self._area))
        # One sample older than the window stays, to interpolate from.
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - LONG_S:
            self._samples.popleft()

    def _area_at(self, at_s: float) -> float:
        """The area up to a time in the past, linear between samples, zero before the first."""
        later_s, later_area = self._changed_s, self._area
        for sample_s, area in reversed(self._samples):
            if sample_s <= at_s:
                span_s = later_s - sample_s
                share = (at_s - sample_s) / span_s if span_s > 0 else 0.0
                return area + (later_area - area) * share
            later_s, later_area = sample_s, area
        return later_area if at_s >= later_s else self._samples[0][1]
