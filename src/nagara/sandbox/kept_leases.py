"""The leases of the keeper's replicas: who holds which slot, and whose time is over.

Which epochs are the newest is also in a file beside the keeper's socket, so that a keeper that
was killed does not let a start through that was already refused. Called by the keeper's one
thread.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagara.sandbox.fence import Fence

LOOK_EVERY_S = 0.5  # while a lease has an end: suspension stops the selector's clock, not ours


@dataclass(frozen=True, slots=True)
class KeptLease:
    """As the keeper is told it. `ttl_s` is infinite where leases have no end."""

    slot: str
    epoch: int
    mark_s: float
    ttl_s: float


def boot_time_s() -> float:
    """Seconds since the machine was started, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KeptLeases:
    """Leases by replica, and the fence around them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fence = Fence(_read(file))
        self._by_slot: dict[str, tuple[str, KeptLease]] = {}  # slot: replica and its lease
        self._over: set[str] = set()  # replicas that must not be launched any more

    def begin(self, replica: str, document: dict[str, Any]) -> tuple[str, ...] | None:
        """A replica is about to be started. Returns replicas to be ended first; None: refused."""
        lease = KeptLease(
            str(document["slot"]),
            int(document["epoch"]),
            *((0.0, math.inf) if (end_s := document.get("end_s")) is None else (end_s, 0.0)),
        )
        old = self._fence.begin(lease, boot_time_s())
        if old is None:
            return None
        self._save()
        ended = self._drop(old)
        self._by_slot[lease.slot] = (replica, lease)
        self._over.discard(replica)
        return ended

    def is_over(self, replica: str) -> bool:
        """Whether the replica's lease has ended before it."""
        return replica in self._over

    def renew(self, documents: list[dict[str, Any]]) -> dict[str, Any]:
        """`{"mark_s", "refused"}`: a reading of the clock, and slots that were not prolonged."""
        renewals = [KeptLease(**document) for document in documents]
        now_s = boot_time_s()
        return {"mark_s": now_s, "refused": list(self._fence.renew(renewals, now_s))}

    def fence(self, slot: str, epoch: int) -> tuple[str, ...]:
        """Refuses older epochs from now on; returns replicas that must be ended."""
        old = self._fence.raise_to(slot, epoch)
        self._save()
        return self._drop(old)

    def expire(self) -> tuple[str, ...]:
        """Replicas whose leases are over: to be ended now."""
        return self._drop(self._fence.expire(boot_time_s()))

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._over.discard(replica)
        for slot, (name, lease) in list(self._by_slot.items()):
            if name == replica:
                del self._by_slot[slot]
                self._fence.end(lease)

    def pause_s(self) -> float | None:
        """How long the keeper may sleep."""
        next_s = self._fence.next_end_s()
        return None if next_s is None else min(LOOK_EVERY_S, max(0.0, next_s - boot_time_s()))

    def _drop(self, slots: tuple[str, ...]) -> tuple[str, ...]:
        ended = tuple(self._by_slot.pop(slot)[0] for slot in slots if slot in self._by_slot)
        self._over.update(ended)
        return ended

    def _save(self) -> None:
        """Not flushed to the disk: after a power cut nothing runs and no start is on its way."""
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(self._fence.newest))
            temporary.replace(self._file)
        except OSError as error:  # a full disk: the memory of this process still fences
            sys.stderr.write(f"the newest epochs are not recorded: {error}\n")


def _read(file: Path) -> dict[str, int]:
    try:
        return {str(slot): int(epoch) for slot, epoch in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
