"""Which replicas have been near what they may use for so long that they want one more beside them.

A replica is strained in a resource while it uses more than `STRAINED` of what it may, in each
reading of the last `FOR_S` seconds. Of a replica that was not read lately nothing is known, and it
counts as not strained. Pure but for its own memory; times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nagara.contract.replica import ReplicaUsage

STRAINED = 0.8
FOR_S = 30.0
STALE_S = 20.0  # several readings that did not come


@dataclass(slots=True)
class _Seen:
    """A replica's last reading, when it came, its shares, and since when each is too high."""

    usage: ReplicaUsage
    at_s: float
    shares: dict[str, float] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)


class Strain:
    """The memory of all replicas' readings."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def take(self, usages: Iterable[ReplicaUsage], now_s: float) -> None:
        """New readings. Replicas that have not been read for long are forgotten."""
        for usage in usages:
            before = self._seen.get(usage.replica)
            if before is not None and before.usage.at_s >= usage.at_s:
                before = None  # the machine has started anew
            shares = dict(_shares(usage, before.usage if before else None))
            since_s = before.since_s if before and now_s - before.at_s <= STALE_S else {}
            since_s = {
                resource: since_s.get(resource, now_s)
                for resource, share in shares.items()
                if share > STRAINED
            }
            self._seen[usage.replica] = _Seen(usage, now_s, shares, since_s)
        for name in [n for n, seen in self._seen.items() if now_s - seen.at_s > STALE_S]:
            del self._seen[name]

    def of(self, replica: str, now_s: float) -> str | None:
        """The resource that a replica is strained in; None if in none."""
        seen = self._seen.get(replica)
        if seen is None or now_s - seen.at_s > STALE_S:
            return None
        long = (name for name, since_s in seen.since_s.items() if now_s - since_s >= FOR_S)
        return next(long, None)

    def shares(self, replica: str) -> dict[str, float]:
        """What a replica uses of what it may at present, by resource, from 0 to 1."""
        seen = self._seen.get(replica)
        return {} if seen is None else dict(seen.shares)


def _shares(usage: ReplicaUsage, before: ReplicaUsage | None) -> Iterator[tuple[str, float]]:
    if before is not None and usage.cores > 0:
        spent_s = max(0.0, usage.cpu_s - before.cpu_s)
        yield "cpu", spent_s / (usage.at_s - before.at_s) / usage.cores
    if usage.memory_limit_bytes > 0:
        yield "memory", usage.memory_bytes / usage.memory_limit_bytes
    if usage.disk_bytes is not None and usage.disk_limit_bytes:
        yield "disk", usage.disk_bytes / usage.disk_limit_bytes
    if usage.device is not None:
        yield "device", usage.device
