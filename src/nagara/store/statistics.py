"""What each tier did: hits, misses, bytes, faults, latency. Called from any thread.

Latencies go into buckets a quarter of an octave wide, so a percentile is right within 19 %
whatever the count, in constant memory.
"""

import math
import threading
from dataclasses import dataclass

_BUCKETS_PER_OCTAVE = 4
_BUCKETS = 40 * _BUCKETS_PER_OCTAVE  # 1 µs to about 12 days


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier's figures since the process began."""

    tier: str
    hits: int
    misses: int
    faults: int
    read_bytes: int
    written_bytes: int
    p50_ms: float | None  # None before the first request
    p99_ms: float | None


class TierStatistics:
    """Counts for one tier."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._hits = self._misses = self._faults = self._read = self._written = 0
        self._latencies = [0] * _BUCKETS
        # Until the shortest answer began; None where a tier does not tell.
        self.distance_s: float | None = None

    def hit(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._hits += 1
            self._read += size_bytes
            self._latencies[_bucket(seconds)] += 1

    def answered(self, seconds: float) -> None:
        """An answer began so long after its question."""
        with self._lock:
            known = self.distance_s
            self.distance_s = seconds if known is None else min(known, seconds)

    def miss(self, seconds: float) -> None:
        with self._lock:
            self._misses += 1
            self._latencies[_bucket(seconds)] += 1

    def fault(self) -> None:
        with self._lock:
            self._faults += 1

    def wrote(self, size_bytes: int) -> None:
        with self._lock:
            self._written += size_bytes

    def report(self) -> TierReport:
        with self._lock:
            p50, p99 = self._percentile(0.5), self._percentile(0.99)
            counts = (self._hits, self._misses, self._faults, self._read, self._written)
            return TierReport(self._tier, *counts, p50, p99)

    def _percentile(self, share: float) -> float | None:
        total = sum(self._latencies)
        if total == 0:
            return None
        wanted, seen = math.ceil(share * total), 0
        for bucket, count in enumerate(self._latencies):
            seen += count
            if seen >= wanted:
                return float(2.0 ** ((bucket + 1) / _BUCKETS_PER_OCTAVE) / 1000)
        raise AssertionError("the buckets add up to the total")


def _bucket(seconds: float) -> int:
    micros = max(seconds * 1e6, 1.0)
    return min(int(math.log2(micros) * _BUCKETS_PER_OCTAVE), _BUCKETS - 1)
