"""What control tells of itself: counts and times, what slots were used for, traces.

One object that the gateway, the fleet and the scaling loop report to, each through a method named
after what happened there.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from nagara.base.clock import Clock
from nagara.control.metrics import Metrics, gauges, series
from nagara.control.occupancy import Occupancy, Use, utilisation
from nagara.control.replicas import Replica, ReplicaState
from nagara.control.service import Service
from nagara.control.state import StartRecord
from nagara.control.token_tally import TokenTally
from nagara.control.tracing import Kind, Span, Started, Tracer


class Telemetry:
    """The three of them.

    Args:
        otlp: an OpenTelemetry collector's address, or None.
    """

    def __init__(self, clock: Clock, otlp: str | None = None) -> None:
        self._clock = clock
        self.metrics = Metrics()
        self.occupancy = Occupancy()
        self.tracer = Tracer(otlp)

    # -- requests --------------------------------------------------------------------------

    def request_begins(self, method: str, path: str, traceparent: str | None) -> Span | None:
        """A request has arrived. `path` without its query."""
        span = self.tracer.request("request", traceparent, time.time_ns())
        if span is not None:
            span.attributes = {"http.request.method": method, "url.path": path}
        return span

    def request_is_sent(
        self, span: Span | None, app: str, queue_s: float, started: Started | None
    ) -> Span | None:
        """It has a replica; returns the span of the exchange with that one."""
        self.metrics.queue_s.add(app, seconds=queue_s)
        if span is None:
            return None
        now_ns = time.time_ns()
        held = self.tracer.child(span, "queue", now_ns - int(queue_s * 1e9))
        self.tracer.end(held, now_ns)
        if started is not None:
            self.tracer.start(span, started)
        return self.tracer.child(span, "upstream", now_ns, Kind.CLIENT)

    def request_ends(
        self, span: Span | None, app: str, status: int, total_s: float, replica: str
    ) -> None:
        """It was answered, or its client went away (499)."""
        self.metrics.requests.add(app, str(status))
        self.metrics.request_s.add(app, seconds=total_s)
        if span is not None:
            span.attributes["http.response.status_code"] = status
            span.attributes["nagara.app"] = app
            if replica:
                span.attributes["nagara.replica"] = replica
            self.tracer.end(span, error=f"status {status}" if status >= 500 else None)

    def tally(self, app: str, counter: TokenTally) -> Callable[[bytes], None]:
        """To be given each piece of an answer as it passes."""

        def take(piece: bytes) -> None:
            if count := counter.take(piece):
                self.metrics.tokens.add(app, amount=count)

        return take

    # -- starts ----------------------------------------------------------------------------

    def start_ends(self, record: StartRecord) -> None:
        """A start came to its end, one way or the other."""
        kind = record.kind or "failed"
        self.metrics.starts.add(record.app, kind)
        self.tracer.start(None, started(record))
        if record.kind is not None:
            self.metrics.start_s.add(record.app, kind, seconds=record.total_s)
            for stage, seconds in record.stages.items():
                self.metrics.stage_s.add(stage, kind, seconds=seconds)

    # -- slots -----------------------------------------------------------------------------

    def slot_reserved(self, replica: Replica, use: Use) -> None:
        """The replica has a slot."""
        now_s = self._clock.monotonic_s()
        self.occupancy.begin(replica.name, replica.app.name, use, now_s)

    def slot_turned(self, service: Service, replica: Replica, is_busy: bool) -> None:
        """A replica has become ready, busy, idle, or is being drained without a request."""
        if is_busy:
            use = Use.BUSY
        else:
            is_kept = replica.state is ReplicaState.READY
            use = service.idle_use() if is_kept else Use.DRAINING
        self.occupancy.turn(replica.name, use, self._clock.monotonic_s())

    def slot_free(self, replica: str) -> None:
        """Its slot is given back."""
        self.occupancy.end(replica, self._clock.monotonic_s())

    # -- the whole -------------------------------------------------------------------------

    def spent_s(self) -> dict[str, dict[Use, float]]:
        """What slots were used for: seconds by app and use."""
        return self.occupancy.spent_s(self._clock.monotonic_s())

    def text(self, services: Iterable[Service]) -> str:
        """Everything in Prometheus's text format but the pool's own figures."""
        return self.metrics.text() + "".join(f"{line}\n" for line in self._lines(list(services)))

    def _lines(self, services: list[Service]) -> Iterator[str]:
        active = [service for service in services if service.replicas]
        yield from series(
            "nagara_replicas", "Replicas by state.", "gauge", ("app", "state"),
            [
                ((service.app.name, state.value), float(count))
                for service in active
                for state, count in service.by_state().items()
            ],
        )  # fmt: skip
        called = [service for service in services if service.dispatcher.demand.now]
        yield from gauges(
            "nagara_requests_held", "Requests that wait for a replica.", "app",
            {service.app.name: service.dispatcher.held for service in called},
        )  # fmt: skip
        yield from gauges(
            "nagara_requests_present", "Requests held or running.", "app",
            {service.app.name: service.dispatcher.demand.now for service in called},
        )  # fmt: skip
        yield "# HELP nagara_apps Deployed apps."
        yield "# TYPE nagara_apps gauge"
        yield f"nagara_apps {len(services)}"
        yield from series(
            "nagara_use_ratio", "What the fullest replica uses of what it may.", "gauge",
            ("app", "resource"), _uses(active),
        )  # fmt: skip
        spent_s = self.spent_s()
        yield from series(
            "nagara_reserved_seconds_total", "What reserved slots were used for.", "counter",
            ("app", "use"),
            [
                ((app, use.value), round(seconds, 3))
                for app, uses in spent_s.items()
                for use, seconds in uses.items()
            ],
        )  # fmt: skip
        shares = {app: utilisation(uses) for app, uses in spent_s.items()}
        yield from gauges(
            "nagara_allocation_utilisation", "Busy share of an app's reserved seconds.", "app",
            {app: round(share, 4) for app, share in shares.items() if share is not None},
        )  # fmt: skip
        yield from _whole(spent_s)
        yield "# HELP nagara_spans_dropped_total Spans that no collector took."
        yield "# TYPE nagara_spans_dropped_total counter"
        yield f"nagara_spans_dropped_total {self.tracer.dropped}"


def _uses(services: Iterable[Service]) -> Iterator[tuple[tuple[str, str], float]]:
    """The highest share of each resource over an app's replicas."""
    for service in services:
        highest: dict[str, float] = {}
        for name in service.replicas:
            for resource, share in service.strain.shares(name).items():
                highest[resource] = max(share, highest.get(resource, 0.0))
        for resource, share in highest.items():
            yield (service.app.name, resource), round(share, 4)


def _whole(spent_s: dict[str, dict[Use, float]]) -> Iterator[str]:
    share = utilisation(total(spent_s))
    if share is not None:
        yield "# HELP nagara_pool_allocation_utilisation Busy share of all reserved seconds."
        yield "# TYPE nagara_pool_allocation_utilisation gauge"
        yield f"nagara_pool_allocation_utilisation {round(share, 4)}"


def total(spent_s: dict[str, dict[Use, float]]) -> dict[Use, float]:
    """The seconds of all apps together, by use."""
    whole: dict[Use, float] = {}
    for uses in spent_s.values():
        for use, seconds in uses.items():
            whole[use] = whole.get(use, 0.0) + seconds
    return whole


def started(record: StartRecord) -> Started:
    """A start's record as its spans need it."""
    stages = {stage: seconds for stage, seconds in record.stages.items() if stage != "unaccounted"}
    begun_ns = int(record.started_s * 1e9)
    return Started(record.replica, record.kind or "failed", begun_ns, record.total_s, stages)
