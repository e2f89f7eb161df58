"""How it stands with the snapshots of one machine: each one's state, what it takes and shares.

Reads the catalogue and the store's lists only. Blocking: call from a worker thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nagara.image.shelf import NOTHING, Share
from nagara.snapshot.catalog import Catalog, Listed


class State(StrEnum):
    """How it stands with one snapshot here."""

    GOOD = "good"
    PARTLY_HERE = "partly here"  # the rest comes from other tiers when it is needed
    STALE = "stale"  # a file of the machine that it stems from has changed
    IN_QUARANTINE = "in quarantine"  # it failed by its own fault too often
    DAMAGED = "damaged"  # its description cannot be read


@dataclass(frozen=True, slots=True)
class Condition:
    """What can be told of one snapshot beside its record.

    `here_bytes` is how much of it is on this machine, None for all of it; `failures` are the
    restores in a row that failed by its fault; `reasons` say what it lacks and why it does not
    count.
    """

    listed: Listed
    state: State
    share: Share = NOTHING
    here_bytes: int | None = None
    failures: int = 0
    reasons: tuple[str, ...] = ()


def conditions(catalog: Catalog) -> list[Condition]:
    """Of every snapshot of this machine."""
    listed = catalog.everything()
    shares = {tenant: catalog.shelf(tenant).shares() for tenant in {one.tenant for one in listed}}
    return [_condition(catalog, one, shares[one.tenant]) for one in listed]


def _condition(catalog: Catalog, listed: Listed, shares: Mapping[str, Share]) -> Condition:
    snapshot = listed.snapshot
    if snapshot is None:
        return Condition(listed, State.DAMAGED, reasons=("its description cannot be read",))
    record, failed = snapshot.record, catalog.reasons(snapshot)
    changed = record.changed_host_file()
    here_bytes = catalog.shelf(snapshot.tenant).here_bytes(snapshot.image)
    reasons = [f"not carried: {note}" for note in record.notes]
    if catalog.is_quarantined(snapshot):
        state = State.IN_QUARANTINE
        reasons += [f"failed: {line}" for line in dict.fromkeys(failed)]
    elif changed is not None:
        state = State.STALE
    else:
        state = State.GOOD if here_bytes is None else State.PARTLY_HERE
    if changed is not None:
        reasons.append(f"{changed} has changed since it was made")
    share = shares.get(snapshot.image.name, NOTHING)
    return Condition(listed, state, share, here_bytes, len(failed), tuple(reasons))
