"""Spans of requests and starts, sent to an OpenTelemetry collector.

OTLP over HTTP in its JSON form, in batches, from one task; W3C `traceparent` in and out. Spans
that the collector does not take in time are dropped and counted: telling must never hold up what
it tells of. Without an address nothing is made and nothing sent. Attributes never carry headers,
queries or bodies.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import aiohttp

from nagara import __version__

MAX_WAITING = 4096  # spans
MAX_BATCH = 512
EVERY_S = 1.0
SEND_S = 5.0

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_log = logging.getLogger(__name__)


class Kind(IntEnum):
    """OTLP's numbers for the side of a call that a span tells of."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(slots=True)
class Span:
    """One timed thing within a trace. Nanoseconds since the epoch."""

    name: str
    trace_id: str
    parent_id: str
    begun_ns: int
    kind: Kind = Kind.INTERNAL
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    ended_ns: int = 0
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None

    @property
    def traceparent(self) -> str:
        """The header by which the next process continues the trace."""
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True, slots=True)
class Started:
    """What a request that waited for a start tells of it in its own trace."""

    replica: str
    kind: str
    begun_ns: int
    total_s: float
    stages: Mapping[str, float]  # seconds, in the order in which they happen


class Tracer:
    """Makes spans and sends them.

    Args:
        endpoint: the collector's address, such as `http://localhost:4318`; None turns it off.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        self._waiting: deque[Span] = deque()
        self._arrived = asyncio.Event()
        self._is_failing = False
        self.dropped = 0

    @property
    def is_on(self) -> bool:
        """Whether spans are made."""
        return self._url is not None

    def request(self, name: str, traceparent: str | None, begun_ns: int) -> Span | None:
        """The span of a request, in its client's trace if that says one; None if off."""
        if self._url is None:
            return None
        match = _TRACEPARENT.fullmatch(traceparent or "")
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return Span(name, secrets.token_hex(16), "", begun_ns, Kind.SERVER)
        if not int(match[3], 16) & 1:
            return None  # its client does not want this one
        return Span(name, match[1], match[2], begun_ns, Kind.SERVER)

    def child(
        self, parent: Span | None, name: str, begun_ns: int, kind: Kind = Kind.INTERNAL
    ) -> Span | None:
        """A part of another span; None if there is none."""
        if parent is None:
            return None
        return Span(name, parent.trace_id, parent.span_id, begun_ns, kind)

    def end(self, span: Span | None, ended_ns: int | None = None, error: str | None = None) -> None:
        """The span is over and may be sent."""
        if span is None or span.ended_ns:
            return
        span.ended_ns = ended_ns or time.time_ns()
        span.error = error
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(span)
        self._arrived.set()

    def start(self, parent: Span | None, started: Started) -> None:
        """A start with its stages, below `parent` or as a trace of its own.

        Of the stages only their lengths are known: they are laid one after the other.
        """
        if self._url is None:
            return
        span = self.child(parent, "start", started.begun_ns) or Span(
            "start", secrets.token_hex(16), "", started.begun_ns
        )
        span.attributes = {"nagara.replica": started.replica, "nagara.start.kind": started.kind}
        at_ns = started.begun_ns
        for stage, seconds in started.stages.items():
            part = self.child(span, stage, at_ns)
            at_ns += int(seconds * 1e9)
            self.end(part, at_ns)
        self.end(span, started.begun_ns + int(started.total_s * 1e9))

    async def run(self) -> None:
        """Sends for ever; cancelled at the end, which sends what is left."""
        if self._url is None:
            return
        timeout = aiohttp.ClientTimeout(total=SEND_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    await self._arrived.wait()
                    self._arrived.clear()
                    await self._send_all(session)
                    await asyncio.sleep(EVERY_S)
            finally:
                await self._send_all(session)

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        assert self._url is not None
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            try:
                async with session.post(self._url, json=document(batch)) as answer:
                    answer.raise_for_status()
                self._is_failing = False
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.dropped += len(batch)
                if not self._is_failing:
                    _log.warning("%s: traces are not taken: %r", self._url, error)
                self._is_failing = True
                return


def document(spans: list[Span]) -> dict[str, Any]:
    """An `ExportTraceServiceRequest` in OTLP's JSON form."""
    resource = {"attributes": _attributes({"service.name": "nagara"})}
    scope = {"name": "nagara", "version": __version__}
    scope_spans = [{"scope": scope, "spans": [_span(span) for span in spans]}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scope_spans}]}


def _span(span: Span) -> dict[str, Any]:
    result: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.begun_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
        "status": {} if span.error is None else {"code": 2, "message": span.error},
    }
    if span.parent_id:
        result["parentSpanId"] = span.parent_id
    return result


def _attributes(values: Mapping[str, str | int | float]) -> list[dict[str, Any]]:
    return [{"key": key, "value": json_value(value)} for key, value in values.items()]


def json_value(value: str | int | float) -> dict[str, Any]:
    """OTLP's `AnyValue`."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value}
