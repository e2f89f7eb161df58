"""Claims that a recorded trace of requests makes: replicas opened when no slot is free. Pure.

A request takes 1 s and 0.03 s for each token generated, on one of a replica's slots; a replica is
given back when it has been idle for `IDLE_S`. A trace is CSV with the columns TIMESTAMP and
GeneratedTokens, or JSON lines with `timestamp` (ms) and `output_length`.
"""

import csv
import heapq
import json
from collections.abc import Iterable, Iterator
from datetime import datetime

from nagara.base.errors import UsageError
from nagara.pool.simulate.claims import Claim

SLOTS, IDLE_S = 8, 60.0
_FIXED_S, _TOKEN_S = 1.0, 0.03


def read_trace(lines: Iterable[str], name: str) -> list[tuple[float, float]]:
    """(arrival, duration) of every request in seconds from the first, in order of arrival."""
    try:
        found = sorted(_requests(iter(lines)))
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"is no trace of requests: {error!r}", where=name) from error
    if not found:
        raise UsageError("has no requests", where=name)
    begun_s = found[0][0]
    return [(at_s - begun_s, _FIXED_S + _TOKEN_S * tokens) for at_s, tokens in found]


def _requests(lines: Iterator[str]) -> Iterator[tuple[float, int]]:
    first = next(lines, None)
    if first is None:
        return
    if first.lstrip().startswith("{"):
        for line in (first, *lines):
            one = json.loads(line)
            yield one["timestamp"] / 1000, int(one["output_length"])
        return
    for row in csv.DictReader((first, *lines)):
        yield datetime.fromisoformat(row["TIMESTAMP"]).timestamp(), int(row["GeneratedTokens"])


def claims_of(requests: list[tuple[float, float]]) -> list[Claim]:
    """One claim for each replica that is opened, for as long as it serves and idles."""
    claims: list[Claim] = []
    free: list[tuple[float, int]] = []  # (when the slot is free, replica), the newest free first
    opened: list[float] = []
    last_s: list[float] = []
    closed: set[int] = set()
    for at_s, takes_s in requests:
        replica = _slot(free, closed, last_s, at_s)
        if replica is None:
            replica = len(opened)
            opened.append(at_s)
            last_s.append(at_s)
            for _ in range(SLOTS - 1):
                heapq.heappush(free, (at_s, replica))
        last_s[replica] = max(last_s[replica], at_s + takes_s)
        heapq.heappush(free, (at_s + takes_s, replica))
    for number, begun_s in enumerate(opened):
        claims.append(Claim(begun_s, 0, last_s[number] + IDLE_S - begun_s))
    return claims


def _slot(
    free: list[tuple[float, int]], closed: set[int], last_s: list[float], at_s: float
) -> int | None:
    """A free slot of a replica that is still open, or None."""
    while free and free[0][0] <= at_s:
        _, replica = heapq.heappop(free)
        if replica in closed:
            continue
        if last_s[replica] + IDLE_S <= at_s:
            closed.add(replica)
            continue
        return replica
    return None
